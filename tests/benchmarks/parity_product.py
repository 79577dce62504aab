"""The parity gate on the embedded pair: every precision, manner, width and row count, 120 cases.

    python tests/benchmarks/parity_product.py [--only float32-greedy]

Prints a line per case; exit code 0 only if every case passes.
"""

import argparse
import sys
import time
from pathlib import Path

import dflash_core  # loads the BLAS that MLX is to find, so it comes first

# isort: split
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deployments.parity import judge
from tests.deployments.parity_cases import PRODUCT, play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name begins with this")
    only = parser.parse_args().only
    failed = 0
    for case in PRODUCT:
        if not str(case).startswith(only):
            continue
        began = time.perf_counter()
        checks = judge(play(case))
        is_good = all(check.is_good for check in checks)
        failed += not is_good
        detail = "; ".join(check.detail for check in checks)
        print(
            f"{'pass' if is_good else 'FAIL'}  {case}  {time.perf_counter() - began:.1f} s  {detail}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    assert dflash_core is not None
    sys.exit(main())
