import argparse

p = argparse.ArgumentParser()
p.add_argument("--local-rank", "--local_rank", type=int)
