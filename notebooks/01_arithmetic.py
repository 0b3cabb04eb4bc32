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
# # What does the E mean?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/pleviz/pleviz/blob/main/notebooks/01_arithmetic.ipynb)
#
# Gemma 4 **E4B** has eight billion parameters, and Google calls it a model of 4.5 billion. The *E*
# stands for *effective*. This notebook finds the missing parameters with nothing but the shapes of
# the tensors: no GPU, no download, no model in memory.

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

from pleviz import arithmetic, fmt_bytes, plots, roofline
from pleviz.format import fmt_count, text_table

# %% [markdown]
# ## First, a prediction
#
# In an ordinary transformer a token is looked up once, in the token embedding, and all layers work
# with what comes of that. Gemma 3n and Gemma 4 E-models have a second, larger lookup table. Before you
# go on: how much of the text model's memory is that table? Put your guess in place of the 10.

# %%
my_guess = 10  # percent of the bytes of Gemma 4 E4B's text model

# %% [markdown]
# ## A vector for every token, in every layer
#
# The table holds one small vector per token *and layer*: Per-Layer Embeddings, PLE. The vectors of a
# token, for all layers, lie side by side in one row.

# %%
spec = pleviz.SPECS["gemma-4-E4B"]
rows, width = spec.table_shape
print(
    f"{spec.num_hidden_layers} layers × {spec.hidden_size_per_layer_input} = {width:,} numbers per row"
)
print(f"{rows:,} rows × {width:,} numbers × 2 bytes = {rows * width * 2:,} bytes")

# %% [markdown]
# Two bytes, because the weights come in bf16. The same sum for the four models with such a table:

# %%
lines = []
for name in pleviz.SPECS:
    table, model = arithmetic.table_bytes(name), pleviz.budget(name).resident_bytes
    share = f"{100 * table / model:.0f} %"
    lines.append([name, fmt_bytes(table), fmt_bytes(model), share])
print(text_table(["text model", "table", "whole model", "share"], lines))
print(f"\nYou guessed {my_guess} % for {name}; it is {share}.")

# %% [markdown]
# ## A token reads one row
#
# A lookup in this table copies one row. How much of the table is that?

# %%
for name in pleviz.SPECS:
    row, table = arithmetic.row_bytes(name), arithmetic.table_bytes(name)
    print(f"{name}: {table:,} bytes ÷ {row:,} bytes = {table // row:,}, remainder {table % row}")

# %% [markdown]
# Always the same number, and no coincidence: it is the number of rows, which is the vocabulary. More
# layers make the row and the table longer by the same factor.

# %%
sizes = {n: (arithmetic.row_bytes(n), arithmetic.table_bytes(n)) for n in pleviz.SPECS}
fig = plots.row_and_table(sizes, title="What one token reads, and what must be kept for it")
pleviz.show(fig, "01-row")
row, table = sizes["gemma-4-E4B"]
print(f"One token of E4B needs {fmt_bytes(row)} of {fmt_bytes(table)}.")

# %% [markdown]
# ## The only large tensor that is hardly read
#
# To write one token, a model multiplies by each of its weight matrices once, so it reads all of them.
# The token embedding is no exception: it is also the output head, which scores every token of the
# vocabulary. Compare, part by part, what is *held* with what is *read*:

# %%
bars = []
for name in pleviz.SPECS:
    held = pleviz.budget(name).components
    read = {**held, "ple_table": arithmetic.row_bytes(name)}
    bars += [plots.Bar(f"{name}, held", held), plots.Bar(f"{name}, read per token", read)]
fig = plots.stacked_bars(bars, title="Bytes held, and bytes read to write one token (bf16)")
pleviz.show(fig, "01-held-read")
idle = 1 - sum(read.values()) / sum(held.values())
print(
    f"{name} holds {fmt_bytes(sum(held.values()))}; {100 * idle:.0f} % of it, the table, is not read."
)

# %% [markdown]
# This is the whole idea behind the E: what is not read need not lie in the fastest memory. Whether it
# may lie in *slow* memory is a question of arithmetic per byte.
#
# ## Arithmetic per byte
#
# *Arithmetic intensity* is FLOP per byte that is moved. A bf16 weight takes 2 bytes and does 2 FLOP
# (multiply, add) per token. Reading it once for many tokens raises the ratio; a row of the table is
# read for one token only, and each number in it is multiplied once, by a scale.

# %%
for op in roofline.operations("gemma-4-E4B", tokens=(1, 256)):
    print(f"{op.label:24} {op.tokens:4} tokens at once: {op.intensity:6.1f} FLOP per byte")

# %% [markdown]
# A GPU has a ratio of its own, its *balance point*: peak arithmetic ÷ memory bandwidth. An operation
# left of it waits for memory, one right of it for arithmetic.

# %%
operations = roofline.operations("gemma-4-E4B")
fig = plots.intensity_chart(operations, title="Gemma 4 E4B: tokens at once, and what bounds them")
pleviz.show(fig, "01-intensity")
h200, row = roofline.MACHINES[0], arithmetic.embedding_row_intensity()
print(f"{h200.name}: balance at {h200.balance:.0f} FLOP per byte; a PLE row stays at {row}.")

# %% [markdown]
# So for the row only its bytes count, and they are few. Suppose each part of the model had to come over
# a PCIe bus for every token, at 12 GB/s (about what PCIe 3.0 × 16 gives in practice):

# %%
bus = 12e9  # bytes per second
for part, nbytes in read.items():
    if nbytes > 10**4:
        print(f"{part:16} {fmt_bytes(nbytes):>9}  {1e3 * nbytes / bus:8.3g} ms per token")

# %% [markdown]
# The row costs microseconds, the feed-forward weights half a second. The table can move to the far side
# of the bus; nothing else of its size can.
#
# ## Which parameters are "effective"?
#
# Google gives Gemma 3n E2B **1.91 B** effective parameters. Leave parts out until that number appears:

# %%
parts = ("ple_table", "towers", "token_embedding")
for n in range(len(parts) + 1):
    count = arithmetic.effective_parameters("gemma-3n-E2B", parts[:n]).effective
    print(f"{fmt_count(count)} without {', '.join(parts[:n]) or 'anything left out'}")

# %% [markdown]
# The table, the vision and audio towers (not loaded for text) and the token embedding must all go. So
# "effective" says what lies in fast memory, not what is computed with: the output head is the token
# embedding, and it is read for every token. The published sizes of all four, recomputed:

# %%
lines = []
for name in pleviz.SPECS:
    e = arithmetic.effective_parameters(name)
    published, parts = e.published, ", ".join(e.left_out)
    lines.append([name, fmt_count(e.total), published.total])
    lines[-1] += [fmt_count(e.effective), published.effective, parts]
print(text_table(["model", "all", "published", "effective", "published", "left out"], lines))

# %% [markdown]
# Two details. Gemma 3n's figures only come out if one counts key and value weights that its checkpoint
# holds for layers which never use them. And Gemma 4 leaves other parts out than Gemma 3n, so effective
# sizes of the two families do not compare. Its E2B lands between Google's 2.3 and 2.4.

# %%
with_unused = arithmetic.effective_parameters("gemma-3n-E2B").effective
unused = arithmetic.unused_kv_parameters("gemma-3n-E2B")
print(f"{fmt_count(with_unused)} − {fmt_count(unused)} = {fmt_count(with_unused - unused)}")

# %% [markdown]
# ## Why 2 GB and 3 GB need quantisation
#
# Google says that Gemma 3n E2B and E4B run in 2 GB and 3 GB of memory. Moving the table is not enough:
# bf16 takes 16 bits per parameter, and this is what there is room for.

# %%
limits = {"gemma-3n-E2B": 2e9, "gemma-3n-E4B": 3e9}
for name, limit in limits.items():
    effective = arithmetic.effective_parameters(name).effective
    bits = 8 * limit / effective
    print(f"{name}: {limit / 1e9:.0f} GB for {fmt_count(effective)}: {bits:.1f} bits per parameter")

# %% [markdown]
# Choose a precision in the figure. `nf4` is 4-bit quantisation with bitsandbytes.

# %%
homes = {"gpu": "table on the GPU", "mapped": "table on the host"}


def bar(name, home, precision):
    parts = pleviz.budget(name, home=home, precision=precision).components
    return plots.Bar(f"{name}, {homes[home]}", parts)


# %%
views = {
    precision: [bar(name, home, precision) for name in pleviz.SPECS for home in homes]
    for precision in ("bf16", "int8", "nf4")
}
fig = plots.stacked_bars(views, title="GPU memory of the text models")
pleviz.show(fig, "01-precision")

# %%
for name in limits:
    parts = pleviz.budget(name, home="mapped", precision="nf4").components
    total, embedding = sum(parts.values()), parts["token_embedding"]
    print(f"{name} in nf4: {fmt_bytes(total)}, {fmt_bytes(embedding)} of it token embedding;")
    print(f"    {fmt_bytes(total - embedding // 2)} with that at 8 bits")

# %% [markdown]
# Just above 2 and 3 GB, and a third to a half of it is a token embedding which bitsandbytes leaves in 16
# bits. At 8 bits it would leave room for a KV cache. (Moving it off the GPU would not do: as the output head
# it is read whole for every token.) The PLE table stays in 16 bits as well, so in `nf4` moving it matters
# more, not less:

# %%
for home, where in homes.items():
    b = pleviz.budget("gemma-4-E4B", home=home, precision="nf4")
    print(f"{b.model} in nf4, {where}: {fmt_bytes(b.resident_bytes)}")

# %% [markdown]
# ## Factorise, or relocate?
#
# ALBERT made its embedding small by factorising it: `[rows, rank] @ [rank, width]`. Here is what that
# would do to E4B's table, next to moving it as it is.

# %%
rows, width = pleviz.SPECS["gemma-4-E4B"].table_shape
lines = [["relocate", "0 B", fmt_bytes(2 * rows * width), "0", "yes"]]
for rank in (64, 256, 1024, arithmetic.break_even_rank("gemma-4-E4B")):
    small = fmt_bytes(2 * arithmetic.factorised_table_parameters("gemma-4-E4B", rank))
    lines.append([f"factorise, rank {rank:,}", small, "0 B", f"{2 * rank * width:,}", "no"])
print(text_table(["", "on the GPU", "on the host", "FLOP per lookup", "same model"], lines))

# %% [markdown]
# Factorising saves memory everywhere, for a few million FLOP per token, but it is another model, which
# has to be trained again; above the last rank in the list it saves nothing. Relocating saves GPU memory
# only and changes no bit of what the model computes.
#
# ## Exercises
#
# Replace `None`. A number in the unit asked for will do, or text with a unit, such as `"3.1 MB"`.
#
# **1.** How many kB is one token's row in Gemma 4 **E2B**, in bf16?

# %%
pleviz.check("01.1", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# spec = pleviz.SPECS["gemma-4-E2B"]
# row = spec.num_hidden_layers * spec.hidden_size_per_layer_input * 2
# pleviz.check("01.1", row / 1e3)
# ```
#
# </details>
#
# **2.** A prompt of 8,500 tokens goes through Gemma 4 **E4B** (bf16). How many MB of the table does it
# read, counting a row for every token?

# %%
pleviz.check("01.2", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# pleviz.check("01.2", 8500 * arithmetic.row_bytes("gemma-4-E4B") / 1e6)
# ```
#
# </details>
#
# **3.** What percentage of the parameters of the text model of Gemma **3n E4B** is its table?
# (`arithmetic.parameters_by_component` has the counts.)

# %%
pleviz.check("01.3", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# counts = arithmetic.parameters_by_component("gemma-3n-E4B")
# pleviz.check("01.3", 100 * counts["ple_table"] / sum(counts.values()))
# ```
#
# </details>
#
# **4.** How many tokens must share one reading of a feed-forward weight of Gemma 4 **E4B**
# (10,240 × 2,560, bf16) before arithmetic, not memory, bounds an H200?

# %%
pleviz.check("01.4", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# tokens = 1
# while arithmetic.matmul_intensity(10_240, 2_560, batch=tokens) < roofline.MACHINES[0].balance:
#     tokens += 1
# pleviz.check("01.4", tokens)
# ```
#
# </details>
#
# Next: [does a real model hold what the arithmetic says?](02_measure.ipynb)

# %% tags=["nbval-ignore-output"]
# what this was run with: differs from machine to machine, so it is not compared
from pleviz.notebook import stamp

stamp()
