"""The example that trains a model: fused and plain operators lead to the same place."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree

import pytest
import torch
from plain import assert_close

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "transnormer"
sys.path.insert(0, str(EXAMPLE))

import model as m  # noqa: E402
import plot  # noqa: E402
import train  # noqa: E402

TINY = m.Config(layers=2, width=32, heads=2)
NAN = float("nan")
ARGUMENTS = ["--batch=4", "--length=64", "--layers=2", "--width=32", "--heads=2"]


def models(config=TINY):
    """The same model with either set of operators."""
    made = []
    for ops in (m.FUSED, m.PLAIN):
        torch.manual_seed(0)
        made.append(m.TransNormer(config, ops))
    return made


def runs(steps, config=TINY):
    """Both models, trained on the shipped text."""
    text = train.Text(EXAMPLE / "corpus.txt", 64)
    pair = [train.Run(ops, config, 0, steps, 3e-3) for ops in (m.FUSED, m.PLAIN)]
    assert train.train(pair, text, steps, batch=4, seed=0)
    return pair


def tokens(*shape):
    return torch.randint(m.SYMBOLS, shape)


# ---- the model


@pytest.mark.parametrize("decays", [[1.0, 1.0], [0.5, 0.99]])
@pytest.mark.parametrize("length", [2, 7, 16, 41])
def test_chunks_are_the_quadratic_form(decays, length):
    q, k = torch.randn(2, 3, 2, length, 8, dtype=torch.float64)
    v = torch.randn(3, 2, length, 5, dtype=torch.float64)
    decay = torch.tensor(decays, dtype=torch.float64)
    t = torch.arange(length)
    since = t[:, None] - t
    weights = torch.where(since >= 0, decay[:, None, None] ** since.abs(), 0.0)
    want = (q @ k.mT * weights) @ v
    o, state = m.linear_attention(q, k, v, decay, chunk=16)
    torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
    # In two calls, the second of which goes on where the first ended.
    cut = length // 2
    first, half = m.linear_attention(*(x[:, :, :cut] for x in (q, k, v)), decay, chunk=16)
    second, end = m.linear_attention(*(x[:, :, cut:] for x in (q, k, v)), decay, half, chunk=16)
    torch.testing.assert_close(torch.cat([first, second], 2), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end, state, rtol=1e-5, atol=1e-5)


def test_strong_decay_over_a_long_text_stays_finite():
    q, k, v = torch.randn(3, 1, 2, 1000, 4).requires_grad_().unbind()
    o, state = m.linear_attention(q, k, v, torch.tensor([1e-3, 1.0]))
    (gradient,) = torch.autograd.grad(o.square().sum(), q)
    assert o.isfinite().all() and state.isfinite().all() and gradient.isfinite().all()


def test_both_sets_have_the_same_parameters():
    fused, plain = models()
    assert [*fused.state_dict()] == [*plain.state_dict()]
    for a, b in zip(fused.state_dict().values(), plain.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    plain.load_state_dict(fused.state_dict())


@pytest.mark.parametrize("decay", [True, False])
def test_logits_and_gradients_agree(decay):
    fused, plain = models(dataclasses.replace(TINY, decay=decay))
    pieces = tokens(3, 101)
    for model in (fused, plain):
        train.loss_of(model, pieces).backward()
    assert_close(fused(pieces)[0], plain(pieces)[0], 64, 2e-5)
    for (name, a), b in zip(fused.named_parameters(), plain.parameters()):
        off = (a.grad - b.grad).norm() / b.grad.norm()
        assert off < 1e-5, f"{name}: {off}"


def test_operators_agree_in_bfloat16():
    fused, plain = models(dataclasses.replace(TINY, dtype=torch.bfloat16))
    exact = models()[1]
    pieces = tokens(3, 65)
    losses = [train.loss_of(model, pieces) for model in (fused, plain, exact)]
    assert all(loss.dtype == torch.float32 for loss in losses)
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-3, atol=0)
    torch.testing.assert_close(losses[0], losses[2], rtol=2e-3, atol=0)
    losses[0].backward()
    assert all(p.grad.dtype == torch.float32 for p in fused.parameters())


@pytest.mark.parametrize("which", [0, 1])
def test_later_tokens_change_nothing(which):
    model = models()[which]
    text = tokens(2, 100)
    before = model(text)[0]
    for place in (99, 70, 64, 30):
        changed = text.clone()
        changed[:, place] = (changed[:, place] + 1) % m.SYMBOLS
        after = model(changed)[0]
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-6)
        assert not torch.allclose(after[:, place], before[:, place], atol=1e-3)


@pytest.mark.parametrize("which", [0, 1])
def test_byte_by_byte_is_the_same(which):
    model = models()[which]
    text = tokens(1, 90)
    want, end = model(text)
    logits, state = model(text[:, :70])
    torch.testing.assert_close(logits, want[:, :70], rtol=1e-4, atol=1e-5)
    for i in range(70, 90):
        logits, state = model(text[:, i : i + 1], state)
        torch.testing.assert_close(logits, want[:, i : i + 1], rtol=1e-4, atol=1e-5)
    assert state.tokens == end.tokens == 90


# ---- the training


def test_curves_agree_and_fall():
    fused, plain = runs(25)
    for a, b in zip(fused.losses, plain.losses):
        assert a == pytest.approx(b, rel=1e-3)
    assert fused.losses[0] > 5.3  # ln 256 is 5.5
    assert fused.losses[-1] < fused.losses[0] - 1
    assert len(fused.seconds) == 25


def test_curves_agree_in_bfloat16():
    fused, plain = runs(25, dataclasses.replace(TINY, dtype=torch.bfloat16))
    for a, b in zip(fused.losses, plain.losses):
        assert a == pytest.approx(b, rel=2e-2)
    assert fused.losses[-1] < fused.losses[0] - 1


def test_the_same_seed_gives_the_same_curve():
    assert runs(5)[0].losses == runs(5)[0].losses


def test_rate_rises_and_falls():
    run = train.Run(m.FUSED, TINY, 0, 400, 1.0)
    rates = [run.rate_at(step) for step in range(400)]
    assert rates[19] == rates[20] == max(rates) == 1.0
    assert rates[:20] == sorted(rates[:20]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert train.Run(m.FUSED, TINY, 0, 1, 1.0).rate_at(0) == 1.0


def test_text_is_split(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    text = train.Text(file, 8)
    assert text.train.tolist() == [*range(180)] and text.validation.tolist() == [*range(180, 200)]
    assert text.validation_pieces().tolist() == [[*range(180, 189)], [*range(188, 197)]]
    seen = text.batch(1000, torch.Generator().manual_seed(0))
    assert seen.shape == (1000, 9) and seen.min() == 0 and seen.max() == 179


# ---- the program


def program(*arguments, **more):
    """Runs it as users do."""
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), *arguments],
        capture_output=True, text=True, timeout=300, **more,
    )  # fmt: skip


def test_compare(tmp_path):
    out = tmp_path / "loss.svg"
    result = program(*ARGUMENTS, "--steps=12", "--compare", f"--out={out}")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no progress bar, as this is no terminal
    for word in ("fused", "unfused", "bits/byte", "A sample", "times as long"):
        assert word in result.stdout
    assert [*tmp_path.iterdir()] == [out]
    root = xml.etree.ElementTree.parse(out).getroot()
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert [len(e.get("points").split()) for e in lines] == [12, 12]


@pytest.mark.parametrize("options", [[], ["--unfused"], ["--dtype=bfloat16"], ["--no-decay"]])
def test_options(options, tmp_path, capsys):
    out = tmp_path / "loss.svg"
    assert train.main([*ARGUMENTS, "--steps=1", f"--out={out}", *options]) == 0
    assert ("unfused" in capsys.readouterr().out) == ("--unfused" in options)
    assert out.exists()


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--steps", "--compare", "--unfused", "--dtype", "--out", "--data", "--seed"):
        assert option in printed


@pytest.mark.parametrize(
    "options, message",
    [
        (["--width=30", "--heads=4"], "--heads is 4, expected a divisor of --width 30"),
        (["--steps=0"], "--steps: is 0, expected at least 1"),
        (["--steps=many"], "--steps: invalid positive value: 'many'"),
        (["--dtype=float8"], "--dtype: invalid choice: 'float8'"),
        (["--data=nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["--length=100000"], "expected at least 1000010"),
        (["--out=nowhere/loss.svg"], "--out: there is no folder nowhere"),
        (["--compare", "--unfused"], "not allowed with argument"),
    ],
)
def test_wrong_options(options, message, capsys):
    with pytest.raises(SystemExit) as end:
        train.main(options)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interrupted(tmp_path):
    """Ctrl-C keeps what was reached. The terminal makes the bar show, which says when to press."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    out = tmp_path / "loss.svg"
    command = [sys.executable, str(EXAMPLE / "train.py"), *ARGUMENTS, "--steps=100000"]
    process = subprocess.Popen(
        [*command, f"--out={out}"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        # A shell may have started the tests in the background, where Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        bar, end = "", time.monotonic() + 200
        while "s left" not in bar and time.monotonic() < end:
            bar += os.read(ours, 4096).decode()
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=200)
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 130
    assert "/100000" in bar and "loss" in bar and "tokens/s" in bar
    assert "Stopped after" in printed and "A sample" in printed
    assert out.exists()


# ---- the plot


@pytest.mark.parametrize("values", [[1.0], [2.0, NAN, 1.0], [NAN], [0.0, 0.0], []])
def test_plots_of_few_values(values, tmp_path):
    file = tmp_path / "a.svg"
    plot.write_plot(file, [plot.Curve("a <b>", values), plot.Curve("c", [3.0])])
    root = xml.etree.ElementTree.parse(file).getroot()
    assert any("a <b>" in (e.text or "") for e in root.iter())
    assert "nan" not in " ".join(e.get("points", "") for e in root.iter())


def test_a_plot_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "a.svg"
    file.write_text("old")
    monkeypatch.setattr(plot, "draw", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plot.write_plot(file, [])
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("high", [0.3, 1, 7, 400, 12345])
def test_round_steps(high):
    steps = plot.round_steps(0, high, 6)
    assert steps[0] == 0 and steps[-1] <= high * 1.0001 and 3 <= len(steps) <= 8
