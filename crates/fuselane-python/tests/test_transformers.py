"""Patched models of Hugging Face transformers against the same models as they are.

All models are tiny and randomly initialised: nothing is downloaded.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fuselane.transformers as ft  # noqa: E402

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3"]
ONE_OF_EACH = ["Llama", "Qwen3", "Gemma3"]  # for what does not depend on the family: a few
SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
NORMS = {"Llama": 5, "Mistral": 5, "Qwen2": 5, "Qwen3": 9, "Gemma": 5, "Gemma2": 9, "Gemma3": 13}


def config(family: str, **options):
    if family in ("Gemma2", "Gemma3"):
        types = ["sliding_attention", "full_attention"]
        options = {"layer_types": types, "sliding_window": 8, **options}
    if family == "Mistral":
        options = {"sliding_window": 8, **options}
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    return getattr(transformers, name)(**{**SIZES, **options})


def make(family: str, seed: int = 0, **options):
    """A model, with norm weights and biases that are not the trivial ones they start with."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config(family, **options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            elif "embed" not in name:
                parameter.mul_(3)  # larger than at the start, so that layers do something
    return model


def tokens(batch: int = 3, length: int = 13, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, SIZES["vocab_size"], (batch, length), generator=generator)


def run(model, ids, **options):
    """Logits, and gradients by parameter."""
    model.zero_grad()
    result = model(ids, labels=ids, use_cache=False, **options)
    result.loss.backward()
    return result.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def distance(a, b) -> float:
    """Of two tensors, relative to the second."""
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def function_of(model):
    """The function of the modeling file that rotary embeddings are applied with."""
    return sys.modules[type(model).__module__].apply_rotary_pos_emb


def original_of(model):
    """The same, without ours in its place, which models that nobody uses any more may have left."""
    gc.collect()
    function = function_of(model)
    return getattr(function, "_fuselane_original", function)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family):
    model, ids = make(family), tokens()
    logits, gradients = run(model, ids)
    assert ft.patch(model) is model
    assert ft.patched(model) == (NORMS[family], 1, 2)
    ours, our_gradients = run(model, ids)
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item())
    for name, gradient in gradients.items():
        assert distance(our_gradients[name], gradient) < 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family):
    """Against float32 with the same weights: ours round once where they round several times."""
    model, ids = make(family).to(torch.bfloat16), tokens()
    exact, exact_gradients = run(copy.deepcopy(model).float(), ids)
    theirs, their_gradients = run(model, ids)
    ours, our_gradients = run(ft.patch(model), ids)
    assert ours.dtype == torch.bfloat16
    assert distance(ours, exact) < 1.1 * distance(theirs, exact)
    for name, gradient in exact_gradients.items():
        assert our_gradients[name].dtype == torch.bfloat16
        their_distance = distance(their_gradients[name], gradient)
        assert distance(our_gradients[name], gradient) < 1.5 * their_distance + 1e-3, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_generation(family, padded):
    model, ids = make(family), tokens(length=7)
    mask = torch.ones_like(ids)
    if padded:
        for row, length in enumerate((0, 2, 5)):
            ids[row, :length] = 0
            mask[row, :length] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    ft.patch(model)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, use_cache=False, **options), expected)
    assert len(set(expected[:, 7:].flatten().tolist())) > 2  # not always the same token


def train(model, optimizer, steps: int = 20) -> list[float]:
    model.train()
    losses = []
    for step in range(steps):
        ids = tokens(4, 16, seed=step % 4)
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_training(family):
    model = make(family)
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=3e-3)
    ft.patch(other)  # after the optimizer was made: it has the same parameters still
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    ours = train(other, optimizer)
    assert losses[-1] < 0.9 * losses[0]
    assert ours == pytest.approx(losses, rel=1e-5)


def test_training_in_bfloat16():
    model = make("Llama").to(torch.bfloat16)
    models = [copy.deepcopy(model).float(), model, ft.patch(copy.deepcopy(model))]
    exact, theirs, ours = (
        train(model, torch.optim.SGD(model.parameters(), lr=0.05)) for model in models
    )
    assert exact[-1] < 0.9 * exact[0]
    assert theirs == pytest.approx(exact, rel=3e-3)
    assert ours == pytest.approx(exact, rel=3e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_everything(family):
    model, ids = make(family), tokens()
    logits, gradients = run(model, ids)
    function = original_of(model)
    attributes = {name: [*vars(module)] for name, module in model.named_modules()}
    classes = {name: type(module) for name, module in model.named_modules()}
    parameters = {name: id(p) for name, p in model.named_parameters()}
    state = [*model.state_dict()]

    ft.patch(model)
    assert [*model.state_dict()] == state
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert function_of(model) is not function
    assert ft.unpatch(model) is model

    assert function_of(model) is function
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: [*vars(module)] for name, module in model.named_modules()} == attributes
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert ft.patched(model) == (0, 0, 0)
    again, gradients_again = run(model, ids)
    assert torch.equal(again, logits)
    for name, gradient in gradients.items():
        assert torch.equal(gradients_again[name], gradient), name
    ft.unpatch(model)  # nothing to do


def test_other_models_of_the_family_are_not_touched():
    one, other, ids = make("Llama"), make("Llama", seed=5), tokens()
    logits, gradients = run(other, ids)
    ft.patch(one)
    again, gradients_again = run(other, ids)
    assert torch.equal(again, logits)
    assert all(torch.equal(gradients_again[name], gradients[name]) for name in gradients)
    ft.unpatch(other)  # was not patched; the first still is
    assert ft.patched(one).rotary == 1
    patched = one(ids).logits
    copied = copy.deepcopy(one)
    ft.unpatch(one)
    assert torch.equal(copied(ids).logits, patched)  # the copy needs the function still
    ft.unpatch(copied)


def test_twice_is_once_and_options_add_up():
    model, ids = make("Llama"), tokens()
    ft.patch(model, rotary=False, activation=False)
    assert ft.patched(model) == (5, 0, 0)
    ft.patch(model, rms_norm=False, activation=False)
    assert ft.patched(model) == (5, 1, 0)
    ft.patch(model)
    logits = model(ids).logits
    classes = [type(module) for module in model.modules()]
    ft.patch(model)
    assert ft.patched(model) == ft.Swapped(rms_norm=5, rotary=1, activation=2)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(ids).logits, logits)
    ft.unpatch(model)
    assert ft.patched(model) == (0, 0, 0)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_copies_pickles_and_state_dicts(family):
    model, ids = ft.patch(make(family)), tokens()
    logits = model(ids).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), loaded):
        assert ft.patched(other) == ft.patched(model)
        assert torch.equal(other(ids).logits, logits)
        ft.unpatch(other)
    fresh = ft.patch(make(family, seed=9))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids).logits, logits)
    plain = make(family, seed=9)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(ids).logits, logits, rtol=1e-4, atol=1e-4)


def test_dtype_and_mode_can_change():
    model, ids = ft.patch(make("Llama")), tokens()
    before = model.train()(ids).logits
    assert torch.equal(model.eval()(ids).logits, before)
    assert model.to(torch.float64)(ids).logits.dtype == torch.float64
    assert model.to(torch.bfloat16)(ids).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_autocast(family):
    """Norms in attention get bfloat16 and have weights of float32."""
    model, ids = make(family), tokens()
    exact, exact_gradients = run(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, their_gradients = run(model, ids)
        ours, our_gradients = run(ft.patch(model), ids)
    assert ours.dtype == theirs.dtype
    assert distance(ours, exact) < 1.2 * distance(theirs, exact)
    for name, gradient in exact_gradients.items():
        their_distance = distance(their_gradients[name], gradient)
        assert distance(our_gradients[name], gradient) < 1.5 * their_distance + 1e-3, name


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family, reentrant):
    model, ids = ft.patch(make(family)).train(), tokens()
    logits, gradients = run(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again, gradients_again = run(model, ids)
    assert torch.equal(again, logits)
    for name, gradient in gradients.items():
        assert torch.equal(gradients_again[name], gradient), name


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_compile_in_one_graph(family):
    """A patched model compiles without a break in the graph, as does one that is not patched."""
    model, ids = ft.patch(make(family)), tokens()
    logits, gradients = run(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = compiled(ids, labels=ids, use_cache=False)
    model.zero_grad()
    result.loss.backward()
    torch.testing.assert_close(result.logits, logits, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert distance(parameter.grad, gradients[name]) < 1e-5, name


def test_patch_after_compile():
    model, ids = make("Llama"), tokens()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        logits = compiled(ids).logits
        assert ft.patch(compiled) is compiled
        assert ft.patched(compiled) == (5, 1, 2)
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
        ft.unpatch(compiled)
        assert torch.equal(compiled(ids).logits, logits)


def test_class(tmp_path):
    cls = transformers.LlamaForCausalLM
    init, before = cls.__init__, make("Llama")
    try:
        assert ft.patch(cls) is cls
        ft.patch(cls)  # once
        assert ft.patched(before) == (0, 0, 0)
        model, ids = make("Llama"), tokens()
        assert ft.patched(model) == (5, 1, 2)
        torch.testing.assert_close(model(ids).logits, before(ids).logits, rtol=1e-5, atol=1e-5)
        before.save_pretrained(tmp_path)
        loaded = cls.from_pretrained(tmp_path)
        assert ft.patched(loaded) == (5, 1, 2)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert ft.patched(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)) == (5, 1, 2)

        class Mine(cls):
            pass

        assert ft.patched(Mine(config("Llama"))) == (5, 1, 2)
    finally:
        assert ft.unpatch(cls) is cls
    assert cls.__init__ is init
    ft.unpatch(cls)
    assert ft.patched(make("Llama")) == (0, 0, 0)
    assert ft.patched(model) == (5, 1, 2)  # those that were made stay


def test_class_that_inherits_its_constructor():
    cls = transformers.LlamaForSequenceClassification
    assert "__init__" not in vars(cls)
    try:
        ft.patch(cls, activation=False)
        assert ft.patched(cls(config("Llama"))) == (5, 1, 0)
        ft.patch(cls, rms_norm=False, rotary=False)
        assert ft.patched(cls(config("Llama"))) == (5, 1, 2)
        assert ft.patched(make("Llama")) == (0, 0, 0)
    finally:
        ft.unpatch(cls)
    assert "__init__" not in vars(cls)


def test_class_wrapped_by_somebody_else_since():
    cls = transformers.LlamaModel
    init = cls.__init__
    try:
        ft.patch(cls)
        wrapped = cls.__init__

        def theirs(self, *args, **kwargs):
            wrapped(self, *args, **kwargs)

        cls.__init__ = theirs
        ft.unpatch(cls)
        assert cls.__init__ is theirs
        assert ft.patched(cls(config("Llama"))) == (0, 0, 0)
        ft.patch(cls)
        assert ft.patched(cls(config("Llama"))) == (5, 1, 2)
        ft.unpatch(cls)
    finally:
        cls.__init__ = init


def rope(rope_type: str, **options):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **options}}


ROPES = {
    "linear": (1, rope("linear", factor=4.0)),
    "llama3": (
        1,
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    # These change with the input, or scale queries and keys.
    "dynamic": (0, rope("dynamic", factor=2.0)),
    "yarn": (0, rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "longrope": (
        0,
        rope(
            "longrope",
            short_factor=[1.0] * 8,
            long_factor=[2.0] * 8,
            original_max_position_embeddings=16,
            factor=4.0,
        ),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_kinds_of_rotary_embeddings(name, caplog):
    count, options = ROPES[name]
    model = make("Llama", **options)
    with caplog.at_level(logging.INFO, "fuselane.transformers"):
        ft.patch(model)
    assert ft.patched(model) == (5, count, 2)
    assert ("rope_type" in caplog.text or "attention_scaling" in caplog.text) == (count == 0)
    # Longer than what the frequencies were made for, and then short again.
    long, short = tokens(2, 80), tokens(2, 9)
    ours = [model(ids).logits for ids in (short, long, short)]
    ft.unpatch(model)
    for logits, ids in zip(ours, (short, long, short)):
        theirs = model(ids).logits
        torch.testing.assert_close(logits, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize(
    "name",
    ["silu", "swish", "gelu", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "relu", "relu2"],
)
def test_activations(name):
    model, ids = make("Llama", hidden_act=name), tokens()
    logits, gradients = run(model, ids)
    ft.patch(model, rms_norm=False, rotary=False)
    assert ft.patched(model) == (0, 0, 2)
    ours, our_gradients = run(model, ids)
    assert distance(ours, logits) < 1e-5
    assert all(distance(our_gradients[name], gradients[name]) < 1e-5 for name in gradients)


def test_what_is_unknown_is_left_alone(caplog):
    model, ids = make("Llama", hidden_act="mish"), tokens()
    modeling = sys.modules[type(model).__module__]

    class OwnRMSNorm(modeling.LlamaRMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    class OwnAttention(modeling.LlamaAttention):
        pass

    model.model.norm.__class__ = OwnRMSNorm
    first = model.model.layers[0]
    first.self_attn.__class__ = OwnAttention
    first.input_layernorm.forward = first.input_layernorm.forward
    logits = model(ids).logits
    with caplog.at_level(logging.INFO, "fuselane.transformers"):
        ft.patch(model)
    assert ft.patched(model) == (3, 0, 0)
    for part in (
        "swapped 3 rms_norm, 0 rotary, 0 activation",
        "model.norm (OwnRMSNorm is unknown)",
        "model.rotary_emb (OwnAttention is unknown)",
        "model.layers.0.mlp.act_fn (MishActivation is unknown)",
        "model.layers.0.input_layernorm (its forward is replaced by somebody else)",
    ):
        assert part in caplog.text
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-5, atol=1e-5)


def test_tensors_of_other_kinds_are_left_alone():
    class Odd(torch.Tensor):
        pass

    model = make("Llama")
    model.model.norm.weight = torch.nn.Parameter(torch.ones(48).as_subclass(Odd))
    ft.patch(model)
    assert ft.patched(model) == (4, 1, 2)


def test_function_replaced_by_somebody_else_since(monkeypatch):
    model, ids = make("Llama"), tokens()
    modeling, logits = sys.modules[type(model).__module__], model(ids).logits
    original = original_of(model)
    ft.patch(model)
    with monkeypatch.context() as context:
        context.setattr(modeling, "apply_rotary_pos_emb", lambda *args: original(*args))
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-5, atol=1e-5)
    ft.unpatch(model)
    assert function_of(model) is original


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_other_devices(family):
    """Layers that come to another device run their own code."""
    model = ft.patch(make(family)).to("meta")
    assert model(tokens().to("meta")).logits.shape == (3, 13, SIZES["vocab_size"])
    from transformers.models.llama import modeling_llama

    q, inv_freq = torch.randn(1, 2, 5, 8, device="meta"), torch.ones(4, device="meta")
    positions = torch.arange(5, device="meta")[None]
    llama = ft.patch(make("Llama"))
    assert modeling_llama.apply_rotary_pos_emb(q, q, positions, inv_freq)[0].shape == q.shape
    ft.unpatch(llama)


def test_positions_of_all_kinds():
    model, ids = make("Llama"), tokens(2, 9)
    shared, own = torch.arange(9)[None] + 3, torch.stack([torch.arange(9), torch.arange(9) * 2])
    kinds = [shared, own, own.int(), shared.expand(2, 9), own.float() + 0.5]
    theirs = [model(ids, position_ids=positions).logits for positions in kinds]
    ft.patch(model)
    for positions, logits in zip(kinds, theirs):
        ours = model(ids, position_ids=positions).logits
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)


def test_errors(monkeypatch):
    bert = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=9,
    )
    families = "Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma2 or Gemma3"
    with pytest.raises(ValueError, match=f"nothing to swap in BertModel.*{families}"):
        ft.patch(transformers.BertModel(bert))
    with pytest.raises(ValueError, match=f"nothing to swap in BertModel.*{families}"):
        ft.patch(transformers.BertModel)
    with pytest.raises(ValueError, match="only a base of models"):
        ft.patch(transformers.LlamaPreTrainedModel)
    with pytest.raises(ValueError, match="nothing to swap in LlamaForCausalLM"):
        ft.patch(make("Llama"), rms_norm=False, rotary=False, activation=False)
    with pytest.raises(TypeError, match="patch: got the class dict, expected a model"):
        ft.patch(dict)
    with pytest.raises(TypeError, match="got list, expected a model"):
        ft.patch([])
    with pytest.raises(TypeError, match="unpatch: got int, expected a model"):
        ft.unpatch(3)
    with pytest.raises(TypeError, match="patched: got type, expected a model"):
        ft.patched(transformers.LlamaModel)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs Hugging Face transformers"):
        ft.patch(torch.nn.Linear(1, 1))


def test_benchmark_runs():
    sizes = ["--hidden", "32", "--layers", "1", "--batch", "1", "--length", "8", "--vocab", "32"]
    options = [*sizes, "--repeats", "1", "--no-compile"]
    command = [sys.executable, "-m", "fuselane.transformers", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "patched" in done.stdout and "bfloat16" in done.stdout
