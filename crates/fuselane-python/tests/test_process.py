"""Threads, forks, the pool, and the end of the interpreter."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import fuselane


def run(code, **environment):
    """Runs a program of its own, and returns what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def threads():
    before = fuselane.get_num_threads()
    yield
    fuselane.set_num_threads(before)


def test_results_do_not_depend_on_threads(threads):
    x, w = torch.randn(1024, 1024), torch.randn(1024)
    results = []
    for n in (1, 2, 3, 7):
        fuselane.set_num_threads(n)
        assert fuselane.get_num_threads() == n
        results.append((fuselane.rms_norm(x, w), fuselane.softmax(x, 0)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_default_threads():
    code = "import torch; torch.set_num_threads(3); import fuselane; print(fuselane.get_num_threads())"
    assert run(code) == "3"
    code = "import torch, fuselane; torch.set_num_threads(4); print(fuselane.get_num_threads())"
    assert run(code) == "4"
    assert run(code, FUSELANE_NUM_THREADS="5") == "5"
    assert run(code, FUSELANE_TORCH_FALLBACK="1") == "4"


def test_many_python_threads():
    x = torch.randn(700, 700)
    want = fuselane.act(x)
    failures = []

    def work():
        for _ in range(20):
            y = x.clone().requires_grad_()
            o = fuselane.act(y)
            o.sum().backward()
            if not torch.equal(o, want) or y.grad is None:
                failures.append(1)

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_the_gil_is_released():
    """Another Python thread goes on while a call runs: here it has to, since the call's thread waits
    for it in a hook of the backward."""
    code = """
        import threading, time, torch, fuselane
        x = torch.randn(64, 1 << 20)
        ticks, done = [0], threading.Event()
        def tick():
            while not done.is_set():
                ticks[0] += 1
                time.sleep(0)
        thread = threading.Thread(target=tick)
        fuselane.act(x)
        import sys
        sys.setswitchinterval(1000)
        thread.start()
        before = ticks[0]
        fuselane.act(x)
        during = ticks[0] - before
        done.set()
        thread.join()
        print(during > 0)
    """
    assert run(code) == "True"


def _in_child(queue):
    torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork
    x = torch.ones(1 << 20)
    queue.put(float(fuselane.act(x, "relu").sum()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_after_use():
    x = torch.ones(1 << 20)
    fuselane.act(x, "relu")  # starts threads and fills the pool
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_in_child, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    assert [queue.get(timeout=60) for _ in children] == [float(1 << 20)] * 2
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert float(fuselane.act(x, "relu").sum()) == float(1 << 20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_while_another_thread_calls():
    code = """
        import os, threading, torch, fuselane
        x = torch.ones(1 << 19)
        table = fuselane.AngleTable([1.0, 0.5], count=2, length=8)
        q = torch.ones(1, 8, 1, 4)
        turned = fuselane.lrpe_rotate(q, table)
        stop = threading.Event()
        def work():
            while not stop.is_set():
                fuselane.act(x, "relu")
                for _ in range(20):
                    fuselane.lrpe_rotate(q, table)
        thread = threading.Thread(target=work)
        thread.start()
        codes = []
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                torch.set_num_threads(1)
                ok = float(fuselane.act(x, "relu").sum()) == float(1 << 19)
                ok = ok and torch.equal(fuselane.lrpe_rotate(q, table), turned)
                os._exit(0 if ok else 1)
            codes.append(os.waitpid(pid, 0)[1])
        stop.set()
        thread.join()
        print(codes)
    """
    assert run(code) == str([0] * 10)


def test_pool_is_used_again():
    code = """
        import torch, fuselane
        x = torch.randn(1 << 20)
        for _ in range(5):
            o = fuselane.act(x)
        stats = fuselane.pool.stats()
        assert stats.reused >= 3 and stats.used_bytes >= 4 << 20, stats
        view = o[10:20]
        kept = view.clone()
        del o
        for _ in range(5):
            fuselane.act(-x)
        assert torch.equal(view, kept)
        del view
        assert fuselane.pool.stats().used_bytes == 0
        fuselane.pool.trim()
        assert fuselane.pool.stats().held_bytes == 0
        fuselane.pool.set_limit(0)
        before = fuselane.pool.stats()
        fuselane.act(x)
        assert fuselane.pool.stats() == before
    """
    run(code)


def test_pool_off():
    code = """
        import torch, fuselane
        o = fuselane.act(torch.randn(1 << 20))
        o.resize_(1 << 21)
        print(fuselane.pool.limit(), fuselane.pool.stats().fresh)
    """
    assert run(code, FUSELANE_POOL="0") == "0 0"


def test_interpreter_exit():
    code = """
        import atexit, threading, numpy, torch, fuselane
        x = torch.randn(1 << 20, requires_grad=True)
        kept = [fuselane.act(x) for _ in range(3)]
        array = fuselane.act(x.detach().numpy())
        atexit.register(lambda: fuselane.act(x.detach()))
        thread = threading.Thread(target=lambda: [fuselane.act(x.detach()) for _ in range(30)])
        thread.start()
        print("done")
    """
    assert run(code) == "done"


def test_torch_is_not_imported():
    assert run("import fuselane, sys; print('torch' in sys.modules)") == "False"
    code = """
        import sys
        sys.modules["torch"] = None  # as if it were not installed
        import fuselane, numpy
        print(fuselane.act(numpy.array([-1.0, 2.0], dtype="float32"), "relu"))
        try:
            fuselane.nn
        except ImportError as error:
            print(type(error).__name__)
    """
    assert run(code) == "[0. 2.]\nModuleNotFoundError"


def test_torch_may_come_later():
    code = "import fuselane, torch; print(fuselane.act(torch.tensor([-1.0, 2.0]), 'relu').tolist())"
    assert run(code) == "[0.0, 2.0]"


def test_fallback_gives_the_same():
    """The way of older versions of PyTorch: kernels that are Python functions."""
    code = """
        import torch, fuselane
        from fuselane import _torch
        torch.manual_seed(0)
        x = torch.randn(3, 7, 16, requires_grad=True)
        w = torch.randn(16, requires_grad=True)
        o = fuselane.rms_norm(fuselane.softmax(fuselane.act(x), 1), w)
        q = fuselane.lrpe_rotate(o.view(3, 7, 2, 8), torch.rand(2, 4), 5, positions=None)
        q.square().sum().backward()
        compiled = torch.compile(fuselane.act, fullgraph=True, backend="aot_eager")
        compiled(x).sum().backward()
        print(_torch.register.FALLBACK_REASON)
        print([t.double().sum().item() for t in (o, q, x.grad, w.grad)])
    """
    fast, slow = run(code).splitlines(), run(code, FUSELANE_TORCH_FALLBACK="1").splitlines()
    assert fast[0] == "None" and slow[0] != "None"
    assert fast[1] == slow[1]


def test_tables_pickle():
    table = fuselane.AngleTable(torch.rand(2, 4), count=4, length=16)
    other = pickle.loads(pickle.dumps(table))
    x = torch.randn(1, 16, 2, 8)
    assert torch.equal(fuselane.lrpe_rotate(x, other), fuselane.lrpe_rotate(x, table))
    assert other.number != table.number and other.nbytes == table.nbytes == 16 * 2 * 4 * 8


def test_tables_of_other_processes_are_not_taken_for_ours():
    code = "import fuselane; print(fuselane.AngleTable([1.0], count=1, length=1).number)"
    assert run(code) != run(code)


def test_data_loader_workers():
    """Workers are forked, and use one thread each."""
    from torch.utils.data import DataLoader, TensorDataset

    fuselane.act(torch.ones(1 << 20))
    data = TensorDataset(torch.ones(4, 1 << 18))
    loader = DataLoader(data, num_workers=2, collate_fn=_collate)
    assert sum(float(x.sum()) for x in loader) == 4 * (1 << 18)


def _collate(items):
    return torch.stack([fuselane.act(x, "relu") for (x,) in items])
