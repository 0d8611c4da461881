"""Where searches run: the CPU, one GPU, or an index cut into pieces for several."""

import re
from typing import Any

from mmcl.index.faiss_factory import reason
from mmcl.index.faiss_setup import load_faiss

CPU, AUTO = "cpu", "auto"
GPU_K = 2048
"""FAISS finds no more than so many per query, and probes no more lists, on a GPU."""
INSTALL = "pip install --force-reinstall --no-deps faiss-gpu"


def check_device(device: Any) -> str:
    """ "cpu", "cuda:N", "cuda:all", or "auto" where there is a GPU to try (else "cpu").

    Raises: ValueError for another name, and for a GPU that is not there, with what to do.
    """
    if device in (CPU, AUTO):
        return AUTO if device == AUTO and gpu_count() else CPU
    match = re.fullmatch(r"cuda(?::(\d+|all))?", device) if isinstance(device, str) else None
    if match is None:
        raise ValueError(f"device must be 'cpu', 'cuda', 'cuda:N', 'cuda:all' or 'auto', got {device!r}")
    there = gpu_count()
    if not there:
        without = "" if hasattr(load_faiss(), "StandardGpuResources") else f"; this FAISS is a CPU build ({INSTALL})"
        raise ValueError(
            f"device {device!r}: FAISS sees no GPU{without}; use device='cpu', or 'auto' to take what is there"
        )
    if match[1] == "all":
        return device
    number = int(match[1] or 0)
    if number >= there:
        raise ValueError(f"device {device!r}: there are {there} GPUs, cuda:0 to cuda:{there - 1}")
    return f"cuda:{number}"


def gpu_count() -> int:
    """GPUs that FAISS sees; 0 in its CPU build."""
    faiss = load_faiss()
    return faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0


def device_name(device: str) -> str:
    """What "auto" comes to where there is a GPU."""
    return "cuda:0" if device == AUTO else device


def on_gpus(index: Any, device: str) -> Any:
    """A copy of a FAISS index on the GPU, or cut into pieces over all GPUs.

    Args:
        device: "cuda:N", "cuda:all", or "auto" for the first.
    Raises: ValueError where FAISS has no GPU form of this type.
    """
    faiss = load_faiss()
    gpus = list(range(gpu_count())) if device == "cuda:all" else [int(device_name(device)[5:])]
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True  # each GPU holds a part, not a copy of everything
    try:
        return faiss.index_cpu_to_gpus_list(index, options, gpus)
    except RuntimeError as error:
        raise ValueError(
            f"FAISS has no GPU form of this type of index ({reason(error)}); use device='cpu' or 'auto', or a factory "
            "such as 'Flat', 'IVF1024,Flat' or 'IVF1024,PQ16'"
        ) from None


def refuse_large_k(k: int, what: str = "k") -> None:
    """ValueError for what is beyond a GPU's reach, with what to do."""
    if k > GPU_K:
        raise ValueError(
            f"{what} = {k} is beyond the {GPU_K} of FAISS on GPUs; ask for less, or use device='cpu' or 'auto'"
        )
