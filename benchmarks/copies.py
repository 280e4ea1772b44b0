"""Measure how many planted near-copies are found, against brute-force Jaccard similarities.

rensa is the library of `zero-tp prepare`, datatrove that of launch/prepare_cluster.py, datasketch
another one.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dated import ROOT  # type: ignore[import-not-found]  # beside this script

CORPUS = ROOT / "launch" / "corpus" / "sotu.jsonl.gz"


def planted(chance: random.Random, copies: int) -> list[str]:
    """Return the shipped corpus in documents of 80 words, and copies of some with up to a
    quarter of words changed.
    """
    from zero_tp.data.documents import read_documents

    words = [text.split() for text in read_documents(CORPUS)]
    texts = [" ".join(each[at : at + 80]) for each in words for at in range(0, len(each) - 80, 80)]
    for text in chance.sample(texts, copies):
        copy = text.split()
        for _ in range(chance.randrange(20)):
            copy[chance.randrange(len(copy))] = chance.choice(("changed", "words", "here", "there"))
        texts.append(" ".join(copy))
    return texts


def truly(sets: Sequence[set[str]], threshold: float) -> set[int]:
    """Return the documents whose Jaccard similarity to an earlier, kept document reaches the
    threshold.

    Pairs without a common shingle have similarity 0 and are left out.
    """
    of_shingle = defaultdict[str, list[int]](list)
    removed = set[int]()
    for number, its in enumerate(sets):
        common = Counter(other for shingle in its for other in of_shingle[shingle])
        if any(
            count / (len(its) + len(sets[other]) - count) >= threshold
            for other, count in common.items()
        ):
            removed.add(number)
            continue
        for shingle in its:
            of_shingle[shingle].append(number)
    return removed


def by_rensa(sets: Sequence[set[str]], texts: Sequence[str]) -> tuple[set[int], dict[str, float]]:
    from zero_tp.tools.corpus.similarity import near_duplicates, sketches

    start_time = time.process_time()
    all_sketches = [
        sketch for at in range(0, len(texts), 500) for sketch in sketches(texts[at : at + 500])
    ]
    sketched = time.process_time()
    removed = {
        near.document for near in near_duplicates(enumerate(all_sketches), all_sketches.__getitem__)
    }
    return removed, {"sketch": sketched - start_time, "index": time.process_time() - sketched}


def by_datasketch(
    sets: Sequence[set[str]], texts: Sequence[str]
) -> tuple[set[int], dict[str, float]]:
    from datasketch import MinHash, MinHashLSH  # type: ignore[import-not-found, unused-ignore]

    from zero_tp.tools.corpus.similarity import shingles

    start_time = time.process_time()
    shingled = [[shingle.encode() for shingle in shingles(text)] for text in texts]
    hashes = list(MinHash.bulk(shingled, num_perm=128, seed=42))
    sketched = time.process_time()
    index = MinHashLSH(num_perm=128, params=(32, 4))
    removed = set[int]()
    for number, its in enumerate(hashes):
        if any(its.jaccard(hashes[other]) >= 0.7 for other in index.query(its)):
            removed.add(number)
        else:
            index.insert(number, its, check_duplication=False)
    return removed, {"sketch": sketched - start_time, "index": time.process_time() - sketched}


def by_datatrove(
    sets: Sequence[set[str]], texts: Sequence[str]
) -> tuple[set[int], dict[str, float]]:
    """Run the MinHash stages of launch/prepare_cluster.py; all documents of a cluster but the
    earliest are duplicates.

    datatrove itself keeps another document of the cluster, as many as here.
    """
    sys.path.insert(0, str(ROOT / "launch"))
    import numpy as np
    from datatrove.data import Document
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupSignature,
    )
    from prepare_cluster import BUCKETS, Words, minhash_config  # type: ignore[import-not-found]

    config = minhash_config()
    documents = (Document(text, str(number)) for number, text in enumerate(texts))
    with tempfile.TemporaryDirectory() as name:
        signatures, buckets, removed = (
            f"{name}/{stage}" for stage in ("signatures", "buckets", "removed")
        )
        start = time.process_time()
        MinhashDedupSignature(signatures, config, Words()).run(documents, 0, 1)
        sketched = time.process_time()
        for rank in range(BUCKETS):
            MinhashDedupBuckets(signatures, buckets, config=config).run(None, rank, BUCKETS)
        MinhashDedupCluster(buckets, removed, config=config, save_cluster_id=True).run(None, 0, 1)
        indexed = time.process_time()
        numbers, clusters = np.fromfile(Path(removed) / "000000.clusters", "<u4").reshape(-1, 2).T
    _, earliest = np.unique(clusters, return_index=True)  # numbers are sorted
    duplicates = set(numbers.tolist()) - set(numbers[earliest].tolist())
    return duplicates, {"sketch": sketched - start, "index": indexed - sketched}


def duplicates(options: argparse.Namespace) -> dict[str, Any]:
    import psutil

    from zero_tp.tools.corpus.similarity import shingles

    texts = planted(random.Random(options.seed), 4000)
    sets = [set(shingles(text)) for text in texts]
    wanted = truly(sets, 0.7)
    result: dict[str, Any] = {"documents": len(texts), "true duplicates at 0.7": len(wanted)}
    libraries: dict[str, Callable[..., tuple[set[int], dict[str, float]]]] = {
        "rensa": by_rensa,
        "datatrove": by_datatrove,
        "datasketch": by_datasketch,
    }
    for name, find in libraries.items():
        before = psutil.Process().memory_info().rss
        found, seconds = find(sets, texts)
        both = len(found & wanted)
        clear = {at: truly(sets, at) for at in (0.8, 0.6)}
        result[name] = {
            "recall": round(both / len(wanted), 4),
            "precision": round(both / len(found), 4),
            "recall of those at 0.8": round(len(found & clear[0.8]) / len(clear[0.8]), 4),
            "removed that are below 0.6": len(found - clear[0.6]),
            **{
                f"{part} [CPU us a document]": round(spent / len(texts) * 1e6, 1)
                for part, spent in seconds.items()
            },
            "resident bytes a document": round(
                (psutil.Process().memory_info().rss - before) / len(texts)
            ),
        }
        print(name, result[name], flush=True)
    return result
