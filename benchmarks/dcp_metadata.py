"""Memory and time of reading a `.metadata` of torch.distributed.checkpoint with very many chunks.

    python -m benchmarks.dcp_metadata FOLDER [--tensors 100000] [--chunks 10] [--ranks 2048]

Makes FOLDER with torch's own classes and pickler (sparse files, no tensor bytes), then reads it in
a process of its own, and prints one line of JSON: bytes, chunks, CPU seconds, peak MiB (VmHWM).
`--plan` plans a conversion of it instead.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
from pathlib import Path

_READ = """
import json, sys, time
from pathlib import Path
if sys.argv[2] == "plan":
    import reshard
    chunks = reshard.plan(sys.argv[1], "dcp:dp8")["copies"]
else:
    from reshard.containers import dcp
    held = dcp.read_metadata(Path(sys.argv[1]))
    chunks = sum(len(e.chunks) for e in held.tensors.values())
peak = next(x.split()[1] for x in open("/proc/self/status") if x.startswith("VmHWM"))
seconds = round(time.process_time(), 1)
print(json.dumps({"chunks": chunks, "cpu_s": seconds, "peak_mib": int(peak) // 1024}))
"""


def make(folder: Path, tensors: int, per: int, ranks: int) -> int:
    """A folder of `tensors` weights, each cut in `per` chunks dealt out to the ranks' files."""
    import torch
    from torch.distributed.checkpoint import metadata as md
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir(parents=True)
    ends, number, length = [0] * ranks, 0, 8 * 2048 * 4 + 1500
    entries: dict[str, md.TensorStorageMetadata | md.BytesStorageMetadata] = {}
    stored, paths = {}, {}
    for t in range(tensors):
        key = f"model.layers.{t // 64}.mlp.experts.{t % 64}.gate_proj.weight"
        chunks = []
        for c in range(per):
            at, rank = torch.Size([8 * c, 0]), number % ranks
            number += 1
            chunks.append(md.ChunkStorageMetadata(at, torch.Size([8, 2048])))
            info = _StorageInfo(f"__{rank}_0.distcp", ends[rank], length)
            stored[md.MetadataIndex(key, at, c)] = info
            ends[rank] += length
        shape = torch.Size([8 * per, 2048])
        entries[key] = md.TensorStorageMetadata(md.TensorProperties(torch.float32), shape, chunks)
        paths[key] = ("model", key.removeprefix("model."))
    made = md.Metadata(entries, paths, stored, md.StorageMeta())
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(end)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(made, file)
        return file.tell()


def main() -> None:
    """Make, read, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--chunks", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2048)
    parser.add_argument("--plan", action="store_true")
    args = parser.parse_args()
    if not args.folder.exists():
        make(args.folder, args.tensors, args.chunks, args.ranks)
    size = (args.folder / ".metadata").stat().st_size
    what = "plan" if args.plan else "read"
    command = [sys.executable, "-c", _READ, str(args.folder), what]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    sys.stdout.write(json.dumps({"bytes": size, **found}) + "\n")


if __name__ == "__main__":
    main()
