"""A short, stable name for a checkpoint's content, so that two processes can tell whether they agree."""

import hashlib
import json
from collections.abc import Mapping

from dflash_core.checkpoints.weight_files import WeightFiles

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def fingerprint(config: Mapping[str, object], files: WeightFiles) -> str:
    """Hash the config, each weight file's name, size and header, and samples of its data.

    Samples are enough to see a retrained checkpoint of the same shape: training moves every weight.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for header in files.headers:
        digest.update(f"{header.path.name} {header.size} {header.digest}".encode(errors="surrogateescape"))
        step = max((header.size - header.data_start) // _SAMPLES, 1)
        with header.path.open("rb") as file:
            for offset in range(header.data_start, header.size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
