"""Write reviews.csv: invented Chinese reviews in the format of ChnSentiCorp, `label,review`.

    python jobs/data/make_reviews.py [FILE]

1 is a good review, 0 a bad one. The phrases are our own, joined at random with a fixed seed, so
the file is the same every time. What follows "but" decides a review that says both, so counting
words alone does not solve it. Like the real file it holds quotes, commas, rows without a review
(`1,`), one that says NaN, and an empty row.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

ROWS = 2400
GOOD, BAD = 1, 0

# Thing, what is good about it, what is bad about it.
ASPECTS: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "这家酒店": [
        ("房间", ["宽敞明亮", "很干净", "很安静", "布置得很温馨"],
         ["又小又暗", "有一股霉味", "隔音很差", "设施陈旧"]),
        ("服务员", ["热情周到", "态度很好", "办事很快"],
         ["态度冷淡", "爱理不理", "半天不来"]),
        ("早餐", ["品种丰富", "味道不错", "新鲜可口"],
         ["品种太少", "都是凉的", "难以下咽"]),
        ("位置", ["靠近地铁", "交通方便", "周围很热闹"],
         ["很难找", "离市区太远", "周围都是工地"]),
    ],
    "这本书": [
        ("内容", ["充实", "引人入胜", "条理清楚", "给人启发"],
         ["空洞", "东拼西凑", "前后矛盾", "陈词滥调"]),
        ("文笔", ["流畅", "优美", "幽默风趣"],
         ["生硬", "啰嗦", "像机器翻译"]),
        ("印刷", ["清晰", "精美", "纸张很好"],
         ["模糊", "错字连篇", "掉页"]),
    ],
    "这台笔记本": [
        ("屏幕", ["色彩鲜艳", "很清楚", "看着舒服"],
         ["有坏点", "偏暗", "漏光严重"]),
        ("电池", ["很耐用", "能用一整天", "充电很快"],
         ["不到两小时就没电", "发烫", "充不满"]),
        ("键盘", ["手感很好", "布局合理"],
         ["手感很差", "有几个键失灵", "太挤"]),
        ("散热", ["很好", "几乎没有声音"],
         ["很差", "风扇声音很大"]),
    ],
}  # fmt: skip
SAID = {
    GOOD: [
        "总的来说很满意。", "值得推荐!", "下次还会来。", "物有所值,好评。",
        '朋友也说"真不错"。', "",
    ],
    BAD: [
        "总的来说很失望。", "不推荐!", "再也不会来了。", "不值这个价,差评。",
        '朋友也说"上当了"。', "",
    ],
}  # fmt: skip
BUT = ["但是", "可是", "不过", "然而"]
OPENINGS = [
    "", "刚用了几天,", "朋友介绍的,", "第二次买了,", "说实话,", "看了评论才来的,",
    "出差的时候,",
]  # fmt: skip


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("reviews.csv")
    draw = random.Random(20261121)
    reviews: dict[str, int] = {}  # no review stands twice: none can be in both parts of a split
    while len(reviews) < ROWS:
        label = draw.choice([GOOD, BAD])
        reviews[make_review(draw, label)] = label
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["label", "review"])
        for number, (review, label) in enumerate(reviews.items()):
            if number in (100, 900, 1700):
                writer.writerow([label, ""])
            if number == 1300:
                writer.writerow([label, "NaN"])
                file.write("\n")
            writer.writerow([label, review])


def make_review(draw: random.Random, label: int) -> str:
    """One review: of one mind, or the other way first and then "but"."""
    subject = draw.choice(list(ASPECTS))
    first, second, *_ = draw.sample(ASPECTS[subject], len(ASPECTS[subject]))
    opening = draw.choice(OPENINGS)
    closing = draw.choice(SAID[label])
    if draw.random() < 0.4:
        before, after = phrase(draw, first, 1 - label), phrase(draw, second, label)
        return f"{opening}{subject}{before},{draw.choice(BUT)}{after}。"
    both = f"{phrase(draw, first, label)},{phrase(draw, second, label)}"
    return f"{opening}{subject}{both}。{closing}"


def phrase(draw: random.Random, aspect: tuple[str, list[str], list[str]], label: int) -> str:
    thing, good, bad = aspect
    stress = draw.choice(["", "真的", "确实"])
    return f"{thing}{stress}{draw.choice(good if label == GOOD else bad)}"


if __name__ == "__main__":
    main()
