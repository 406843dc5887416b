import argparse


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=0)
    p.add_argument("--lr", type=float, default=0.0)
    return p.parse_args()
