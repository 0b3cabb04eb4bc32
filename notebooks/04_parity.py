# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is it really bit-identical?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/pleviz/pleviz/blob/main/notebooks/04_parity.ipynb)
#
# "I moved the table and the answers look the same" is not a proof. This notebook says what would be one,
# shows six ways to be fooled, and runs the proof. All of it is live, on small Gemma models with random
# weights; the last table was recorded on a GPU with the real shapes.

# %%
# Installs pleviz where it is missing (Colab). A torch that is already there stays as it is.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("pleviz") is None:
    source = "pleviz[notebooks] @ git+https://github.com/pleviz/pleviz"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %%
import pleviz

pleviz.quiet()  # no warnings or progress bars of libraries, fixed seeds

import torch

from pleviz import faults, plots_parity, recorded, rounding
from pleviz.format import text_table

# %% [markdown]
# ## First, a prediction
#
# A model has over half a million weights. You change one of them by the smallest amount that there is. How
# many percent of the numbers that it puts out (its *logits*) change?

# %%
my_guess = 1  # percent of the logits

# %% [markdown]
# ## The smallest amount that there is
#
# Weights come in `bfloat16`: one bit for the sign, 8 for the exponent, 7 for the digits after the leading
# one (the *mantissa*). Between two neighbours there is nothing. The distance to the next number is called a
# **ULP**, a unit in the last place.

# %%
for number in (1.0, 1.0 + rounding.step(1.0, torch.bfloat16), 1.01, 2.0):
    print(f"{number:<9} {rounding.bits(number, torch.bfloat16)}")

# %% [markdown]
# The second line differs from the first in its last bit. And 1.01 has the same bits: `bfloat16` has no such
# number, so it was *rounded* to the nearest one. Here are the numbers that there are:

# %%
pleviz.show(plots_parity.number_ruler(), "04-ruler")

# %%
lines = []
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    steps = [f"{rounding.step(number, dtype):.3g}" for number in (0.01, 1.0, 20.0)]
    lines.append([str(dtype).removeprefix("torch."), *steps])
print(text_table(["one ULP at", "0.01", "1", "20"], lines))

# %% [markdown]
# A ULP is not a fixed amount: it grows with the number. At 20, where large logits lie, it is 0.125 in
# `bfloat16`. So an absolute tolerance, as in "equal to within 0.01", means something else at each size.
#
# **Bit-identical** is simpler: every bit is the same, the distance is 0 ULP everywhere.
#
# ## Who rounds?
#
# Arithmetic does. The exact sum of two numbers usually has more digits than fit, and the order decides
# which are lost:

# %%
a, b, c = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
print(f"(256 + 1) + 1 = {(a + b) + c:g}")
print(f"256 + (1 + 1) = {a + (b + c):g}")

# %% [markdown]
# Between 256 and 512 the numbers are 2 apart, so adding 1 is lost each time. A matrix product is a long sum,
# and each kernel adds in its own order. That is why two correct programs disagree in the last bits.
#
# A lookup, or *gather*, has nothing to round: it copies bits. Let every 16-bit pattern go through one, also
# those that are no number:

# %%
patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(-1, 64)
every = patterns.view(torch.bfloat16)  # a table with all of them
order = torch.randperm(len(every))
rows = torch.nn.functional.embedding(order, every)
same = int((rows.view(torch.int16) == patterns[order]).sum())
print(f"{same:,} of {every.numel():,} patterns unchanged, {every.isnan().sum():,} NaNs among them")

# %% [markdown]
# Compare `float16`, through which [only 4,352 of the 32,640](03_homes.ipynb) came back. So if a home hands
# the model the same rows, and everything after that is the same code on the same device with the same
# shapes, then the same bits *must* come out. That is the argument. The rest is checking it.
#
# ## The check
#
# `pleviz.diff` runs a model before and after its table moves. It compares, bit by bit, each stage of the
# forward pass, the logits, and greedy tokens; then it checks that the table matters at all.

# %%
model = pleviz.build("gemma-4-E4B", scale="tiny")
ids = torch.randint(3, 1024, (1, 48), generator=torch.Generator().manual_seed(0))
moved = pleviz.diff(model, "cpu", ids, max_new_tokens=8)
print(moved)

# %% [markdown]
# `IDENTICAL`, in every stage. (With `"mapped"` or `"file"` in place of `"cpu"` the call is the same; on a GPU
# use those.) Now the other direction: would `diff` notice? Change one weight, of layer 2, by one ULP.

# %%
faulty = faults.plant(model, "layers.2.post_attention_layernorm.weight")
planted = pleviz.diff(model, faulty, ids)
print(f"verdict: {planted.verdict}, first difference: {planted.first_difference}")
print("weights that differ:", [weight.name for weight in planted.weights])

# %%
share = planted.logits.differing / planted.logits.total
print(
    f"You guessed {my_guess} % of the logits. It is {10 * round(10 * share)} %, to the nearest ten."
)

# %% [markdown]
# The smallest change there is, and nearly all of the output moves. The report stage by stage names the place:
# all before layer 2 is equal, and from there on every layer differs. (Per-layer inputs stay equal, as they
# come straight from the table.)

# %% tags=["nbval-ignore-output"]
# the numbers below depend on the processor's kernels, so this output is not compared
print(planted)

# %% [markdown]
# Two columns measure the size of a difference. *max ULP* counts steps between numbers, and *max |A-B|* says
# how far apart they are. The steps look frightening because they are tiny near zero:

# %%
near = rounding.numbers_between(0, 0.01, torch.bfloat16)
print(f"steps from -0.01 to 0.01 in bfloat16: {2 * (len(near) - 1):,}")

# %% [markdown]
# ## Six ways to be fooled
#
# ### 1. A tolerance
#
# The planted fault again, with the comparison that most test suites use:

# %%
with torch.no_grad():
    good, bad = model(ids).logits.float(), faulty(ids).logits.float()
print("torch.allclose, tolerance 0.05:", torch.allclose(good, bad, atol=0.05))
print("torch.equal:                   ", torch.equal(good, bad))

# %% [markdown]
# A tolerance that forgives rounding forgives a wrong weight too. For a move there is nothing to forgive, so
# pleviz' own tests use `torch.equal` only.
#
# ### 2. NaN is equal to NaN
#
# One broken weight, and every logit is NaN ("not a number"). Such a model, compared with itself:

# %%
import copy

broken = copy.deepcopy(model)
broken.model.layers[5].mlp.down_proj.weight.data[0, 0] = float("nan")
with torch.no_grad():
    out = broken(ids).logits
print("NaN everywhere:", bool(out.isnan().all()))
print("allclose with equal_nan=True:", torch.allclose(out, out, equal_nan=True))

# %%
parity = pleviz.diff(broken, "cpu", ids)
print(parity.verdict, "| first stage:", parity.first_difference, "| ok:", parity.ok)

# %% [markdown]
# The bits *are* the same. But they say nothing about a model that works, so `diff` does not call it equal.
#
# ### 3. A comparison that cannot fail
#
# `transformers` builds a new Gemma 3n with one scale set to zero, `altup.correct_output_scale`. It multiplies
# what comes from the table. (`pleviz.build` sets it to 1; here we put it back.)

# %%
fresh = pleviz.build("gemma-3n-E2B", scale="tiny")
for name, parameter in fresh.named_parameters():
    if name.endswith("altup.correct_output_scale"):
        parameter.data.zero_()
ruined = copy.deepcopy(fresh)
pleviz.find_table(ruined).weight.data.mul_(50)
with torch.no_grad():
    print("table × 50, same logits:", torch.equal(fresh(ids).logits, ruined(ids).logits))

# %%
parity = pleviz.diff(fresh, "cpu", ids)
print(parity.verdict, "| ok:", parity.ok)
print("next:", *parity.next_steps())

# %% [markdown]
# With such a model any home passes any test, also one that returns rubbish. So `diff` runs the model once
# more with other rows, to see whether the logits care.
#
# ### 4. The same weights, other buffers
#
# Two ways to load a model in `bfloat16`. All parameters come out equal, bit for bit.

# %%
import tempfile

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    load = type(model).from_pretrained
    direct = load(folder, dtype=torch.bfloat16)
    cast = load(folder, dtype=torch.float32).to(torch.bfloat16)
    eager = load(folder, dtype=torch.bfloat16, attn_implementation="eager")

# %%
buffers = pleviz.diff(direct, cast, ids)
print(f"verdict: {buffers.verdict}, first difference: {buffers.first_difference}")
for weight in buffers.weights:
    print(f"{weight.kind}: {weight.name}")

# %%
name = "sliding_attention_inv_freq"
for label, one in (("from_pretrained(dtype=bf16)", direct), ("….to(bf16)", cast)):
    buffer = getattr(one.model.rotary_emb, name)
    print(f"{label:28} {buffer.dtype}: {[f'{value:.5f}' for value in buffer[:4].tolist()]}")

# %% [markdown]
# No parameter is listed, only four buffers: rotary frequencies, kept in `float32` on purpose. `.to(bfloat16)`
# rounds them as well, and all positions turn by slightly wrong angles. Neither home nor table had a part in
# that. So compare homes on one loaded model, never across two ways of loading.
#
# ### 5. Another kernel, another batch
#
# `eager` and `sdpa` are two implementations of the same attention, with the same weights:

# %%
kernels = pleviz.diff(direct, eager, ids)
print(f"verdict: {kernels.verdict}, weights that differ: {len(kernels.weights)}")
print("next:", *kernels.next_steps())

# %% [markdown]
# Neither is wrong; they add in different orders. The same happens when a prompt goes through in a batch with
# a longer one, padded on the left:

# %%
longer = torch.randint(3, 1024, (1, 64), generator=torch.Generator().manual_seed(1))
padded = torch.cat([torch.zeros(1, 16, dtype=torch.long), ids], dim=1)
batch = torch.cat([longer, padded])
mask = torch.ones_like(batch)
mask[1, :16] = 0
with torch.no_grad():
    alone, batched = direct(ids).logits[0], direct(batch, attention_mask=mask).logits[1, 16:]
print("same prompt, same logits:", torch.equal(alone, batched))

# %%
print(pleviz.diff(direct, "cpu", batch, attention_mask=mask).sentence)

# %% [markdown]
# Alone and in a batch differ. But the *same* batch before and after the move is identical. That is the
# comparison to make: let only the table move.
#
# ### 6. Ties
#
# Greedy decoding takes the token with the largest logit. In `bfloat16` the largest need not be alone:

# %%
print("numbers in bfloat16 from 16 to 30:", len(rounding.numbers_between(16, 30, torch.bfloat16)))
close = torch.tensor([20.01, 20.04])
print("float32 chooses token", int(close.argmax()), "of", close.tolist())
print("bfloat16 chooses token", int(close.bfloat16().argmax()), "of", close.bfloat16().tolist())

# %% [markdown]
# All large logits share these few values. Where two are equal, the order of the search decides, and that may
# differ between `argmax`, `topk` and a beam search, or between two devices. Tokens can differ between two
# models that are both right, and they can be equal in two that are not. So look at the logits first, at the
# tokens second.
#
# ## All of it in one figure
#
# How much of each stage differs from the untouched model, in the order of the forward pass:

# %%
fig = plots_parity.divergence(
    {
        "table moved to another home": moved,
        "one weight off by one ULP (layer 2)": planted,
        "another attention kernel": kernels,
        "rotary buffers rounded": buffers,
    },
    title="Where a model begins to differ from itself, stage by stage",
    alt="The moved table stays at zero in all stages. The planted fault is at zero up to layer 2 and "
    "high from there on. The other kernel and the rounded buffers are high from layer 0 on.",
)
pleviz.show(fig, "04-divergence")

# %% [markdown]
# There is no "almost" in this figure. A curve lies on the floor, or it leaves it for good at the stage where
# something happened.
#
# ## A long proof
#
# One forward pass is one sample. In greedy decoding each token depends on all before it, so a single
# different bit would be carried along. `greedy_trace` decodes from a fixed prompt and takes a *checksum* of
# all logits at every step. Live, with the small model:

# %%
from pleviz.benchmarks import greedy_trace

tokens, sums = greedy_trace(model, 16)
with pleviz.offload(model, "cpu"):
    tokens_moved, sums_moved = greedy_trace(model, 16)
print(f"{len(tokens)} tokens equal: {torch.equal(tokens, tokens_moved)}")
print(f"{len(sums)} checksums equal: {torch.equal(sums, sums_moved)}")

# %%
tokens_faulty, sums_faulty = greedy_trace(faulty, 16)
print(f"planted fault, checksums equal: {int((sums == sums_faulty).sum())} of {len(sums)}")

# %% [markdown]
# The fault shows in every checksum. Now the real shapes, recorded on a GPU. First each home against `gpu`:
# all logits of a prompt of 48 tokens, and some greedy tokens, with the models in two precisions.

# %%
text, source = recorded.short_parity()
print(text or "not recorded in this copy of pleviz", source, sep="\n")

# %% [markdown]
# Also the two ways that people used before are exact, if the table keeps its dtype; what they cost is
# another matter. And the long comparison: 2,287 greedy tokens, with a checksum of all logits at each.
# *distinct* counts different tokens among them, since a model that repeats itself would prove less.

# %%
text, source = recorded.long_parity()
print(text or "not recorded in this copy of pleviz", source, sep="\n")

# %% [markdown]
# ## Exercises
#
# Replace `None` by a number, or by one of the words in quotes.
#
# **1.** How many ULP apart are 1.0 and 1.5 in `bfloat16`?

# %%
pleviz.check("04.1", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# import torch
#
# from pleviz.rounding import step
#
# pleviz.check("04.1", 0.5 / step(1.0, torch.bfloat16))
# ```
#
# </details>
#
# **2.** Two models return NaN in every logit, with the same bits, and their weights are equal. The verdict of
# `pleviz.diff`: `"identical"`, `"different"`, `"non-finite"` or `"vacuous"`?

# %%
pleviz.check("04.2", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# pleviz.check("04.2", "non-finite")
# ```
#
# </details>
#
# **3.** Somebody planted a fault of one ULP in one decoder layer of this model. Which layer?
#
# ```python
# mystery = faults.suspect(model)
# ```

# %%
pleviz.check("04.3", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# import torch
#
# from pleviz import faults
#
# model = pleviz.build("gemma-4-E4B", scale="tiny")
# ids = torch.arange(3, 51)[None]
# parity = pleviz.diff(model, faults.suspect(model), ids)
# pleviz.check("04.3", parity.first_difference.removeprefix("layer "))
# ```
#
# </details>
#
# **4.** A faulty home changes one greedy token in 10,000, at random. With how many percent probability do all
# 2,287 tokens of a comparison agree with the right ones?

# %%
pleviz.check("04.4", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# pleviz.check("04.4", 100 * (1 - 1 / 10_000) ** 2287)
# ```
#
# </details>

# %% tags=["nbval-ignore-output"]
# what this was run with: differs from machine to machine, so it is not compared
from pleviz.notebook import stamp

stamp()
