import os

from arguments import get_args

a = get_args()
print("LOCAL", a.local_rank, "RANK", os.environ["RANK"], f"device cuda:{a.local_rank}")
