"""What all Python providers need of a job: its input files, and which elements are sampled.

The form of a job is that of `Job` in the program's `protocol.rs`.
"""

import mmap
import os

BYTES = {"bf16": 2, "f16": 2, "f32": 4}


class Unsupported(Exception):
    """The library does not have this operator, or not this mode of it."""


def cpus():
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count()))


def input_names(job):
    """The inputs of the forward, in the order of the job."""
    return [spec["name"] for spec in job["inputs"] if spec["name"] != "grad"]


def trained(names):
    """The inputs that get a gradient: the frequencies are constants, and the gradient of a residual
    is that of x."""
    return [name for name in names if name not in ("theta", "residual")]


def elements(spec):
    count = 1
    for length in spec["shape"]:
        count *= length
    return count


def open_input(spec):
    """An input's file, unbuffered, which has at least the bytes of its shape."""
    needed = elements(spec) * BYTES[spec["dtype"]]
    file = open(spec["path"], "rb", buffering=0)
    size = os.fstat(file.fileno()).st_size
    if size < needed:
        file.close()
        raise EOFError(f"input {spec['name']} ({spec['path']}): {size} of {needed} bytes")
    return file


def map_input(spec):
    """An input's file as read-only memory, its pages already present."""
    with open_input(spec) as file:
        length = elements(spec) * BYTES[spec["dtype"]]
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # Linux has it
        return mmap.mmap(file.fileno(), length, flags=flags, prot=mmap.PROT_READ)


def sampled(samples, size):
    """The slices of an output of `size` elements that the samples are made of."""
    for sample in samples:
        for i in range(sample["count"]):
            start = sample["start"] + i * sample["step"]
            end = start + sample["length"]
            if end > size:
                raise IndexError("a sample outside its output")
            yield slice(start, end)
