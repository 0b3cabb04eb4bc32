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
# # Measure VRAM before and after
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/pleviz/pleviz/blob/main/notebooks/02_measure.ipynb)
#
# [Arithmetic](01_arithmetic.ipynb) says that the PLE table is a third to a half of Gemma E2B and E4B,
# and hardly read. Here we move it off the GPU and look: does a real model hold what the shapes say,
# before and after?
#
# Numbers labelled **live** come from the machine that runs this notebook: real shapes on a GPU, tiny
# ones without. Numbers labelled **recorded** were measured on the GPU that is named beside them. All
# weights are random; memory depends on their shapes, not on their values.

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

from pleviz import compare, fmt_bytes, plots, watch
from pleviz.format import text_table

# %% [markdown]
# ## First, a prediction
#
# Gemma 4 E4B's text model takes 15 GB of a GPU in bf16. By how many percent will that fall when its PLE
# table moves to host memory?

# %%
my_guess = 20  # percent

# %% [markdown]
# `pleviz.budget` adds up every tensor of a model from its shapes. With the home `mapped` the table lies
# in host memory, and the GPU reads single rows of it over the bus.

# %%
lines = []
for name in pleviz.SPECS:
    before, after = (pleviz.budget(name, home=home).resident_bytes for home in ("gpu", "mapped"))
    change = f"−{100 * (1 - after / before):.0f} %"
    lines.append([name, fmt_bytes(before), fmt_bytes(after), change])
print(text_table(["predicted", "table on the GPU", "table mapped", "change"], lines))
print(f"\nYou guessed −{my_guess} % for {name}; the shapes say {change}.")

# %% [markdown]
# ## Live: does a model hold what its shapes say?
#
# Now the real `transformers` classes. With a GPU, the models that fit are built on it at their real
# shapes, and torch's counter of allocated bytes is read. Without one they are tiny, and their tensors are
# added up.

# %%
room = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
need = {name: pleviz.budget(name, context=8500).prefill_peak_bytes for name in pleviz.SPECS}
fitting = [name for name in need if need[name] < 0.95 * room]
cuda, models = bool(fitting), fitting or list(need)
device, scale = ("cuda", "real") if cuda else ("cpu", "tiny")
print(f"live on {device}, {scale} shapes: {', '.join(models)}")

# %%
live = compare.live(models, scale=scale, device=device)
print(compare.table(live, f"live, {scale} shapes"))

# %% [markdown]
# Read the last column. Without a GPU it is zero: the shapes give every byte. With one it must stay below
# half a percent, since torch's allocator rounds each tensor up to 512 bytes.

# %%
bars = [plots.Bar(seen.label, seen.predicted.components, seen.measured) for seen in live]
title = "Before and after the move: bars predicted, diamonds measured"
pleviz.show(plots.stacked_bars(bars, title=title, source=live[0].source), "02-live")

# %% [markdown]
# ## Live: the moment of the move
#
# `pleviz.MemoryProbe` samples memory while a block of code runs, and `mark` puts a name on the timeline.
# The next cell does in essence this, and reads a prompt before and after the move:
#
# ```python
# model = pleviz.build("gemma-4-E4B", scale="real", device="cuda")
# with pleviz.MemoryProbe() as probe:
#     pleviz.offload(model, "mapped")
#     probe.mark("table moved")
# ```
#
# Without a GPU there is no VRAM to watch. Then we watch this process' own memory, with a model that is
# narrow but has the whole vocabulary, and its table moves to the home `file`: the memory map of its own
# checkpoint.

# %%
move = watch.watch_move(models[-1], device=device)
print(f"{move.model}: a table of {fmt_bytes(move.table_bytes)} moved to the home {move.home!r}.")

# %%
series = ("allocated", "reserved") if cuda else ("rss",)
title = f"{move.model}: memory while the table moves"
source = "live on this GPU" if cuda else "live: this process' memory, not a GPU's"
levels = (
    dict(zip(("predicted before", "predicted after"), move.resident, strict=True)) if cuda else {}
)
fig = plots.timeline(move.timeline, title=title, source=source, series=series, levels=levels)
pleviz.show(fig, "02-live-timeline")

# %%
marks = {s.event: s.allocated if cuda else s.rss for s in move.timeline if s.event}
fell = marks["prompt read"] - marks["table moved"]
print("It fell by the size of the table, to within 10 %:", abs(fell / move.table_bytes - 1) < 0.1)

# %% [markdown]
# The step at *table moved* is as high as the table is large: nothing else has moved. The prompt is read
# again after it, with rows that come from the table's new home. (In the home `file` that makes the kernel
# map a few MB of the file. It may drop those at any time, so they are not memory that the process needs.)
#
# ## Recorded: real shapes on a data-centre GPU
#
# The repository's folder `records/` holds measurements together with the machine, versions, date and commit
# they were made with. Each row ran in a process of its own.

# %%
recorded = {precision: compare.recorded(precision) for precision in ("bf16", "nf4")}
recorded = {precision: some for precision, some in recorded.items() if some}
for precision, some in recorded.items():
    print(compare.table(some, f"recorded, {precision}"), end="\n\n")
print(*dict.fromkeys(some[0].source for some in recorded.values()) or ["no records here"], sep="\n")

# %% [markdown]
# In bf16 the shapes give the memory almost to the byte. In `nf4` there are many more and smaller tensors
# (scales of the 4-bit blocks), and the allocator's rounding shows:

# %%
for precision, some in recorded.items():
    worst = max(abs(seen.difference) for seen in some)
    print(f"{precision}: predicted to within {100 * worst:.3f} % for all models and both homes")

# %%
views = {
    precision: [plots.Bar(seen.label, seen.predicted.components, seen.measured) for seen in some]
    for precision, some in recorded.items()
}
if views:
    title = "Before and after the move: bars predicted, diamonds measured"
    fig = plots.stacked_bars(views, title=title, source=recorded["bf16"][0].source)
    pleviz.show(fig, "02-recorded")

# %%
for precision, (*_, before, after) in recorded.items():
    change = f"{fmt_bytes(before.measured)} → {fmt_bytes(after.measured)}"
    percent = 100 * (1 - after.measured / before.measured)
    print(f"{before.model} in {precision}: {change}, {percent:.0f} % less")

# %% [markdown]
# In `nf4` the matrices shrink to 4 bits and the table does not, so moving it saves the larger share.
#
# What does it cost? The same model in every home: the peak while a prompt of 8,500 tokens is read, the
# seconds that takes, and tokens written per second. Each `×` is the ratio to `gpu`. The rows `device_map`
# and `workaround` are what people used before; the [next notebook](03_homes.ipynb) takes them apart.

# %%
print(compare.costs("gemma-4-E4B"))

# %% [markdown]
# Compare `gpu` and `mapped`: resident and peak fall by the same amount, the table, and reading takes the
# same time. Eager writing keeps the CPU busy launching kernels one by one, and its speed varies by a tenth
# from run to run; compiled, the two homes can be told apart to a percent.
#
# ## Recorded: the moment of the move

# %%
moves = watch.recorded_moves()
for seen, source in moves[-1:]:
    levels = dict(zip(("predicted before", "predicted after"), seen.resident, strict=True))
    title = f"{seen.model}: GPU memory while the table moves"
    fig = plots.timeline(seen.timeline, title=title, source=source, levels=levels)
    pleviz.show(fig, "02-timeline")
print("moves recorded on a GPU:", ", ".join(seen.model for seen, _ in moves) or "none yet")

# %% [markdown]
# (Where there is such a record, the figure is the one above with real shapes: the same prompt makes the same
# bump twice, each time on top of a level that was predicted.)
#
# ## Three ways to misread VRAM
#
# Three counters are called "VRAM", and each answers another question.
#
# * **allocated** (`torch.cuda.memory_allocated`) is what live tensors take. Judge a move by this one.
# * **reserved** (`torch.cuda.memory_reserved`) adds torch's *cache*: memory of deleted tensors, kept for
#   the next ones. *Mistake 1: to read reserved as need.* `torch.cuda.empty_cache()` returns the cache.
# * **nvidia-smi** adds the *CUDA context* (kernels and handles, hundreds of MB, until the process ends) and
#   all other programs. *Mistake 2: to read it as the size of the model.*
#
# *Mistake 3* follows from both: delete a tensor, see no change in `nvidia-smi`, and conclude that nothing was
# freed. It was freed; the cache has it.
#
# How large is the cache? It keeps at least what the peak needed on top of the live tensors:

# %%
bars = []
for seen in recorded.get("bf16", []):
    cache = seen.row.get("peak_prefill_bytes", seen.measured) - seen.measured
    bars.append(plots.Bar(seen.label, {"allocated": seen.measured, "cache": cache}))
if bars:
    title = "Reserved after a prompt of 8,500 tokens (at least)"
    fig = plots.stacked_bars(bars, title=title, source=recorded["bf16"][0].source)
    pleviz.show(fig, "02-cache")
    print(f"{bars[-1].label}: {fmt_bytes(cache)} of {fmt_bytes(bars[-1].total)} are cache.")

# %% [markdown]
# Reserved falls by the table here because `offload` empties the cache once the table has moved. Move it by
# hand, and its bytes stay in the cache: `nvidia-smi` shows no change at all. Where a GPU was watched, all
# three counters can be compared:

# %%
for seen, source in ([(move, "live on this GPU")] if cuda else moves)[-1:]:
    bars = [plots.Bar(label, seen.parts(moment)) for moment, label in watch.MOMENTS.items()]
    title = f"{seen.model}: what nvidia-smi shows, and what it is made of"
    pleviz.show(plots.stacked_bars(bars, title=title, source=source), "02-counters")
    for bar in bars:
        parts = ", ".join(f"{fmt_bytes(n)} {part}" for part, n in bar.parts.items())
        print(f"{bar.label}: nvidia-smi shows {fmt_bytes(bar.total)} = {parts}")

# %% [markdown]
# ## Exercises
#
# Replace `None`. A number in the unit asked for will do, or text with a unit, or plain bytes.
#
# **1.** By how many GB does moving the table of Gemma **3n E2B** (bf16) lower what the GPU holds?

# %%
pleviz.check("02.1", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# before, after = (pleviz.budget("gemma-3n-E2B", home=home) for home in ("gpu", "mapped"))
# pleviz.check("02.1", (before.resident_bytes - after.resident_bytes) / 1e9)
# ```
#
# </details>
#
# **2.** A card with 12 GB (12 × 10⁹ bytes) is to hold Gemma 4 **E4B** in bf16, its table mapped, and the KV
# cache of 8,500 tokens. How many GB are left?

# %%
pleviz.check("02.2", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# need = pleviz.budget("gemma-4-E4B", home="mapped", context=8500)
# pleviz.check("02.2", (12e9 - need.resident_bytes - need.kv_cache_bytes) / 1e9)
# ```
#
# </details>
#
# **3.** You delete a tensor of 1 GB and touch nothing else. Which counter goes down at once: `"allocated"`,
# `"reserved"` or `"device_used"` (`nvidia-smi`)?

# %%
pleviz.check("02.3", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# pleviz.check("02.3", "allocated")
# ```
#
# </details>
#
# **4.** torch reports 14.9 GB allocated and 15.4 GB reserved; `nvidia-smi` shows 16.1 GB. How many GB can
# `torch.cuda.empty_cache()` return at most?

# %%
pleviz.check("02.4", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# pleviz.check("02.4", 15.4 - 14.9)
# ```
#
# </details>

# %% tags=["nbval-ignore-output"]
# what this was run with: differs from machine to machine, so it is not compared
from pleviz.notebook import stamp

stamp()
