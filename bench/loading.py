"""What a rank needs to load its shards of a checkpoint: 2.2 GB of safetensors in four files, on four gloo processes.

    python bench/loading.py                # Llama of 1.1 B parameters in bfloat16
    python bench/loading.py --layers 4     # a smaller one

The files are random and are made first, in a temporary directory, a layer at a time. "peak" is what a process held at
most beyond what it held when all was imported (its resident set, pages of mapped files included); "shards" is what it
holds in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from transformers import LlamaConfig

from placement.integrations import transformers as hf

RANKS, FILES = 4, 4


def write(folder: Path, layers: int) -> int:
    """The checkpoint, its tensors dealt out to the files in turn; gives its bytes."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    shapes = {name: tuple(x.shape) for name, x in hf.from_config(config).state_dict().items()}
    names, placed = list(shapes), {}
    for number in range(FILES):
        file = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        own = names[len(names) * number // FILES : len(names) * (number + 1) // FILES]
        save_file({name: torch.rand(shapes[name], dtype=torch.bfloat16) for name in own}, folder / file)
        placed |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _most() -> int:
    """Bytes that this process has held at most. ``getrusage`` counts what its parent held too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def load(rank: int, folder: str, results: str) -> None:
    """One rank: compile without weights, then load."""
    dist.init_process_group("gloo", init_method=f"file://{results}/meet", rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    ids = {name: torch.zeros(2, 64, dtype=torch.int64) for name in ("input_ids", "labels")}
    imported = _most()
    started = time.perf_counter()
    program = hf.compile(folder, mesh, example=ids)
    taken = time.perf_counter() - started
    peak = _most() - imported
    held = sum(p.numel() * p.element_size() for p in program.parameters())
    (Path(results) / str(rank)).write_text(json.dumps([imported, peak, held, taken]))
    dist.destroy_process_group()


def main(layers: int) -> None:
    """Print a line for each rank."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as results:
        total = write(Path(folder), layers)
        print(f"{total / 1e9:.2f} GB in {FILES} files, a third of it {total / 3e6:.0f} MB")
        mp.spawn(load, (folder, results), nprocs=RANKS)
        for rank in range(RANKS):
            imported, peak, held, taken = json.loads((Path(results) / str(rank)).read_text())
            print(
                f"rank {rank}: peak {peak / 1e6:.0f} MB beyond the {imported / 1e6:.0f} MB of the imports, "
                f"shards {held / 1e6:.0f} MB, {taken:.1f} s with the compilation"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    main(parser.parse_args().layers)
