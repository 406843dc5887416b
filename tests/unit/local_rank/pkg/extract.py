import argparse
import os

p = argparse.ArgumentParser()
p.add_argument("--local-rank", type=int, default=-1)
p.add_argument("--lr", type=float, default=0.0)
a = p.parse_args()
print("LOCAL", a.local_rank, "LR", a.lr, "RANK", os.environ.get("RANK"))
