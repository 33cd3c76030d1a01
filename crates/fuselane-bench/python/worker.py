"""One Python provider in a process of its own: `python worker.py PROVIDER`, which is torch,
torch_compile, fuselane_python or jax.

Driven by `fuselane bench` with lines of JSON, as its `protocol.rs` says. The loop, the clock and
the reading of memory are here and the same for all; a library is in `torch_peer.py`,
`fuselane_peer.py` or `jax_peer.py`.
"""

import ctypes
import gc
import json
import os
import resource
import sys
import time

from job import Unsupported, cpus


def main(provider):
    # Libraries and compilers print, and their children read: what they find as standard input and
    # output is not the protocol.
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def say(reply):
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    library = start(provider)
    versions = {"python": sys.version.split()[0], **library.versions()}
    say({"is": "hello", "versions": versions})
    worker = Worker(library)
    for line in requests:
        try:
            reply = worker.answer(json.loads(line))
        except Unsupported as lack:
            reply = {"is": "unsupported", "why": one_line(lack)}
        except Exception as error:  # whatever it was, the next job may work
            reply = {"is": "failed", "why": f"{type(error).__name__}: {one_line(error)}"}
        say(reply)


def start(provider):
    """The library of a provider. Imports are here, so that each worker loads its own only."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
    if provider in ("torch", "torch_compile"):
        from torch_peer import Torch

        return Torch(compiled=provider == "torch_compile")
    if provider == "fuselane_python":
        from fuselane_peer import Fuselane

        return Fuselane()
    if provider == "jax":
        # XLA makes as many threads as it finds CPUs when it is loaded, and has no setting.
        if 0 < threads < len(cpus()):
            os.sched_setaffinity(0, cpus()[:threads])
        from jax_peer import Jax

        return Jax()
    sys.exit(f"no provider {provider!r} in Python")


def one_line(error):
    """The message of an error. Compilers write pages; the first lines say what happened."""
    return " ".join(str(error).split())[:500]


class Worker:
    """Answers requests."""

    def __init__(self, library):
        self.library = library
        self.loaded = None
        self.prepared = None

    def answer(self, request):
        return getattr(self, "do_" + request.pop("do"))(**request)

    def do_prepare(self, job):
        self.expect_nothing_prepared()
        try:
            self.loaded = self.library.load(job)
            call = self.loaded.call()
            warm_up(call, job["alloc"])
            self.prepared = call
        finally:
            if self.prepared is None:
                self.free()
        return {"is": "ready"}

    def do_outputs(self, samples, folder):
        """Writes parts of the outputs of the last run."""
        call = self.need_prepared()
        for name, parts in samples.items():
            call.sample(name, parts).astype("<f4").tofile(os.path.join(folder, name + ".f32"))
        return {"is": "written"}

    def do_round(self, calls, settle):
        run = self.need_prepared().run
        if settle:
            run()
        ns = []
        for _ in range(calls):
            begin = time.perf_counter_ns()
            run()
            ns.append(time.perf_counter_ns() - begin)
        return {"is": "times", "ns": ns}

    def do_release(self):
        self.free()
        return {"is": "released"}

    def do_memory(self, job):
        self.expect_nothing_prepared()
        give_memory_back_at_once()
        try:
            self.loaded = self.library.load(job)
            self.loaded.call().run()  # threads, compiled code, whatever is set up at the first call
            self.settle()
            before = status_bytes("VmRSS")
            call = self.loaded.call()  # of a backward, runs the forward
            self.settle()
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # VmHWM starts anew from what is resident now
            call.run()
            return {"is": "memory", "extra_bytes": max(status_bytes("VmHWM") - before, 0)}
        finally:
            call = None
            self.free()

    def need_prepared(self):
        if self.prepared is None:
            raise RuntimeError("nothing is prepared")
        return self.prepared

    def expect_nothing_prepared(self):
        if self.prepared is not None:
            raise RuntimeError("the last job is not released")

    def free(self):
        self.prepared = self.loaded = None
        self.library.forget()
        self.settle()

    def settle(self):
        """Gives memory that nothing uses back to the system, also what allocators keep."""
        gc.collect()
        self.library.trim()
        if hasattr(LIBC, "malloc_trim"):  # glibc
            LIBC.malloc_trim(0)


def warm_up(call, alloc):
    """Two calls, the first of which compiles. Where memory is to be used again, a few more if the
    allocator still took new one: now and then it has to find its order first. Slow calls are not
    worth that."""
    call.run()
    for _ in range(6):
        faults, begin = page_faults(), time.perf_counter()
        call.run()
        slow = time.perf_counter() - begin > 1
        if slow or alloc == "fresh" or page_faults() - faults < 100:
            break


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


LIBC = ctypes.CDLL(None)


def give_memory_back_at_once():
    """Each large block gets a mapping of its own, which ends when it is freed. Otherwise blocks
    that were freed before stay resident (malloc_trim does not reach the end of a thread's heap),
    and the peak would be of the allocator rather than of the tensors.

    This lasts: a worker that has measured memory is none for `fresh` timings any more.
    """
    if hasattr(LIBC, "mallopt"):
        trim_threshold, mmap_threshold, mmap_max = -1, -3, -4
        LIBC.mallopt(mmap_max, 1 << 20)
        LIBC.mallopt(mmap_threshold, 128 << 10)
        LIBC.mallopt(trim_threshold, 128 << 10)


def status_bytes(field):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"the system does not tell {field}")


if __name__ == "__main__":
    main(sys.argv[1])
