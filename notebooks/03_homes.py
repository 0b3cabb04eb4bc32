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
# # Where can the table live, and what does each home cost?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/pleviz/pleviz/blob/main/notebooks/03_homes.ipynb)
#
# A token reads one row of the PLE table, about 20 kB of 5 GB. So the table may live anywhere from which a
# row can be fetched quickly. This notebook takes the places apart: four that pleviz offers, and two that
# people used before. You need neither a GPU nor a download; what only a GPU can show was recorded on one.

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

from pleviz import fmt_bytes, plots_homes, plots_parity
from pleviz.format import text_table

cuda = torch.cuda.is_available()

# %% [markdown]
# ## First, a prediction
#
# `transformers` has an official way to keep a module off the GPU: name it in the `device_map`.
#
# ```python
# from_pretrained("google/gemma-4-E4B-it", device_map={…: 0, "model.embed_tokens_per_layer": "cpu"})
# ```
#
# The model loads, and the table is not on the GPU. How many kB cross the bus for each token it then
# writes? A row of this table has 21.5 kB.

# %%
my_guess = 21.5  # kB per token

# %% [markdown]
# ## Four homes
#
# | home | where the table is | how a row gets to the GPU |
# |---|---|---|
# | `gpu` | GPU memory | it is there |
# | `mapped` | RAM, page-locked where it lies | the GPU reads it over the bus |
# | `file` | the checkpoint file's own pages in RAM | the GPU reads it over the bus |
# | `cpu` | RAM | the CPU collects the rows and sends them up |
#
# `pleviz.offload(model, home)` moves the table, and `pleviz.budget` knows what a home needs:

# %%
lines = []
for home in ("gpu", "mapped", "file", "cpu"):
    b = pleviz.budget("gemma-4-E4B", home=home, context=8500)
    sizes = b.resident_bytes, b.prefill_peak_bytes, sum(b.host_components.values())
    lines.append([home, *map(fmt_bytes, (*sizes, b.bytes_per_token))])
print(text_table([b.model, "on the GPU", "GPU peak", "on the host", "bus per token"], lines))

# %% [markdown]
# Three homes take the same 5.64 GB off the GPU and move the same 21.5 kB per token. They differ in *who*
# fetches the row, and that decides the speed. First, however, the way that looks simplest.
#
# ## What `device_map={…: "cpu"}` really does
#
# A module on the CPU cannot work with tensors on the GPU. So accelerate, the library behind `device_map`,
# hangs a *hook* on it that runs before and after each call. Here is a small Gemma 4 with random weights and
# the very same hook. Its place of execution is the CPU instead of a GPU, so that this runs anywhere. It
# takes the weight from a dictionary, and ours counts what it hands out:

# %%
from accelerate.hooks import AlignDevicesHook, add_hook_to_module


class Counting(dict):
    moved = 0

    def __getitem__(self, name):
        tensor = super().__getitem__(name)
        self.moved += tensor.nbytes
        return tensor


# %%
model = pleviz.build("gemma-4-E4B", scale="tiny")
table = pleviz.find_table(model)
weights = Counting(weight=table.weight.detach().clone())
hook = AlignDevicesHook("cpu", offload=True, io_same_device=True, weights_map=weights)
add_hook_to_module(table.module, hook)
print(f"table: {table.nbytes:,} bytes, row: {table.row_nbytes:,} bytes")
print("where the model's own copy is now:", table.weight.device)

# %% [markdown]
# `meta` is torch's word for a tensor without memory. The promise is kept: while the model is at rest, the
# table takes no room where the model computes. Now let it write ten tokens, one forward pass each.

# %%
prompt = torch.tensor([[2, 5, 9, 20, 33, 7]])
options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
tokens = model.generate(prompt, **options)
by_hook = weights.moved
print(f"{by_hook:,} bytes moved = {by_hook / table.nbytes:g} × the whole table")

# %% [markdown]
# Each forward pass copied *all* rows in, used one (the first pass: six), and threw the copy away. Now pleviz,
# on the same model: `offload` takes the hook off and gives the table a home. A second counter stands at the
# lookup itself and adds up the rows that leave the table.

# %%
rows = []
with pleviz.offload(model, "cpu"):
    counter = table.module.register_forward_hook(lambda *call: rows.append(call[2].nbytes))
    same = torch.equal(tokens, model.generate(prompt, **options))
    counter.remove()
print(f"{sum(rows):,} bytes moved; first the prompt's {len(prompt[0])} rows, then one per token:")
print(rows)
print("same tokens:", same)

# %% [markdown]
# Same tokens, and a fraction of the traffic. (At the end of the `with` block the model is as it was, hook
# included, so we take that off for good.)

# %%
from accelerate.hooks import remove_hook_from_module

remove_hook_from_module(table.module)
print(f"{by_hook:,} ÷ {sum(rows):,} = {by_hook / sum(rows):,.0f} times less")

# %% [markdown]
# That was a table of 1,024 rows. The hook's bill grows with the table, ours does not. At full size:

# %%
naive = pleviz.budget("gemma-4-E4B", home="device_map", context=8500)
kilobytes = naive.bytes_per_token / 1e3
print(f"You guessed {my_guess:,} kB per token. With device_map it is {kilobytes:,.0f} kB,")
print(f"{naive.bytes_per_token // naive.row_bytes:,} rows for each one that is used.")
print(f"GPU peak: {fmt_bytes(naive.prefill_peak_bytes)}, as the copy must lie there too.")

# %% [markdown]
# So both complaints that people file about this are true: "the table is on the CPU, but my GPU runs out of
# memory", and "it works, but at one token per second". What the bus alone allows:

# %%
from pleviz.advice import LINKS

lines = []
for link, speed in LINKS.items():
    row, whole = naive.row_bytes / speed, naive.table_bytes / speed
    lines.append([link, f"{row * 1e6:.1f} µs", f"{whole * 1e3:.0f} ms", f"{1 / whole:.1f}"])
print(text_table(["link", "one row", "whole table", "at most, tokens/s"], lines))

# %% [markdown]
# The last column is an upper bound for `device_map`, even with a GPU that computes in no time. A row takes
# microseconds on any link.
#
# ## On a GPU: what each home costs
#
# Measured on a real GPU, at real shapes with random weights. `workaround` is the patch that many people
# paste from a forum: ids to the CPU, ordinary lookup there, rows back up.

# %%
from pleviz import recorded

costs, source = recorded.speed_by_home()
print("recorded on:", source or "no GPU; this copy of pleviz has no such record")

# %%
if costs:
    title = "What each home costs: 8,500-token prompt, then decoding"
    pleviz.show(plots_homes.home_costs(costs, title=title, source=source), "03-costs")

# %%
for name, rows in costs.items():
    speed = {row["home"]: row["decode_tok_s"] for row in rows}
    slower = speed["gpu"] / speed["device_map"]
    print(f"{name}: device_map {speed['device_map']:.1f} tokens/s, {slower:.0f} × slower than gpu")

# %% [markdown]
# Look at the two outer panels together (decoding is eager, one sequence). `device_map` has the peak of a
# model that was never offloaded, and a fraction of its speed. All others have the small peak. Their
# decoding speeds scatter, and now and then a home comes out ahead of `gpu`: at ten tokens per second the
# GPU waits for Python, which starts every kernel one by one, and where the table lies does not show.
# Compiled into one graph, the kernels wait for nobody:

# %%
text, _ = recorded.compiled_decoding()
print(text or "not recorded in this copy of pleviz")

# %% [markdown]
# A ratio of 1 means no slower; these scatter around it by up to 3 %. The middle panel of the figure is about
# a prompt of 8,500 tokens, which needs as many rows:

# %%
print(recorded.prefill_changes(costs) or "not recorded in this copy of pleviz")

# %% [markdown]
# Here it shows who fetches the rows: the GPU itself (`mapped`), the CPU into a pinned buffer (`cpu`), or the
# CPU into ordinary memory that must be copied once more before it can go up (`workaround`).
#
# ## Live: one lookup, several ways
#
# Without a GPU this cell compares, in RAM, copying a table with reading rows of it. With one, it times the
# real thing on a table as wide as E4B's but shorter.

# %%
from pleviz.lookups import MID_SIZE, time_lookups

width = pleviz.SPECS["gemma-4-E4B"].table_shape[1]
lookups = time_lookups(width=width, device="cuda" if cuda else "cpu")
title = f"One lookup in a table of {fmt_bytes(2 * MID_SIZE[cuda] * width)}"
source = f"live on {torch.cuda.get_device_name()}" if cuda else "live on this CPU, in RAM"
pleviz.show(plots_homes.lookup_times(lookups, title=title, source=source), "03-lookups")

# %%
one = {lookup.way: lookup.seconds for lookup in lookups if lookup.tokens == 1}
print("copying takes over 100 times as long for one token:", one["device_map"] > 100 * one["cpu"])

# %% [markdown]
# The upper line is the price of a copy: it is there for one token as for a thousand. Recorded on a GPU, with
# the whole table, the homes among themselves:

# %%
lookups, source = recorded.lookups_by_home("gemma-4-E4B")
if lookups:
    title = "One lookup in Gemma 4 E4B's table"
    pleviz.show(plots_homes.lookup_times(lookups, title=title, source=source), "03-gather")
print("recorded:", f"{len(lookups)} lookups" if lookups else "nothing in this copy of pleviz")

# %% [markdown]
# What does it take to move in? `mapped` and `file` leave the table where it is and tell the driver about
# it. *Private RAM* is memory that this process alone needs: a file's pages belong to the operating system,
# which shares them among all programs that read the file.

# %%
text, source = recorded.attaching("gemma-4-E4B")
print(text or "not recorded in this copy of pleviz", source, sep="\n")

# %% [markdown]
# ## A copy in float16 is not the same table
#
# A popular variant of the workaround keeps the CPU copy in `float16`, since CPUs handle it well. It has 16
# bits like `bfloat16`, so nothing should be lost? Try it on every number there is:

# %%
from pleviz.rounding import bf16_numbers, changed_by_fp16, survives_fp16

numbers = bf16_numbers()
back = survives_fp16(numbers)
print(f"{len(numbers):,} bfloat16 numbers from 0 up; {int(back.sum()):,} come back from float16")
exact = numbers[back & (numbers > 0)]
print(f"the smallest is {exact.min():.3g}, the largest {exact.max():,.0f}")

# %% [markdown]
# Most do not. `bfloat16` spends 8 bits on the exponent and reaches from 10⁻³⁸ to 10³⁸; `float16` spends 5.
# Weights, though, are not spread evenly over all numbers. Drawn from N(0, 0.02²), as a table starts out:

# %%
pleviz.show(plots_parity.fp16_window(0.02), "03-fp16")
weights = (torch.randn(10**7) * 0.02).bfloat16()
changed = (weights.half().bfloat16() != weights).float().mean().item()
print(f"changed: {changed:.2%} of ten million weights, {changed_by_fp16(0.02):.4%} by theory")

# %% [markdown]
# Two in ten thousand sounds like nothing. But a row has thousands of weights, and a lookup takes a row:

# %%
lost = changed_by_fp16(0.02)
print(f"changed weights in E4B's table: {lost * naive.table_bytes / 2:,.0f}")
print(f"changed weights in one row:     {lost * width:.1f} on average")
print(f"rows with none at all:          {(1 - lost) ** width:.0%}")

# %% [markdown]
# Nine tokens in ten read a changed row. `pleviz.diff` compares two models bit by bit, and finds the place:

# %%
import copy

half = copy.deepcopy(model)
row_of = pleviz.find_table(half).weight.data
row_of.copy_(row_of.half().bfloat16())
ids = torch.arange(3, 1003)[None]
parity = pleviz.diff(model, half, ids)
print(f"verdict: {parity.verdict}, first at: {parity.first_difference}")

# %% [markdown]
# Small changes, and probably harmless ones. But then "the same model" is an opinion, and with an exact copy
# it is a fact. pleviz never casts the table. ([The next notebook](04_parity.ipynb) is about such proofs.)
#
# ## How `mapped` works, in 20 lines
#
# Two steps. `cudaHostRegister` *page-locks* memory: the operating system may no longer move or swap those
# pages, so the GPU can be given their addresses. Then torch must be told that a tensor on the GPU begins at
# that address. There is a protocol for it: an object that describes memory in an attribute.


# %%
class Window:
    """Describes the memory of ``host`` to anyone who asks, on the CPU and on the GPU."""

    def __init__(self, host):
        self.host = host  # the memory must live as long as the window
        self.__array_interface__ = self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<i2",  # the protocol knows no bfloat16: call it a 16-bit integer
            "data": (host.data_ptr(), False),
            "version": 3,
        }


# %% [markdown]
# On the CPU the same protocol connects NumPy and torch. Two tensors, one memory:

# %%
import numpy as np

host = torch.zeros(4, 8, dtype=torch.bfloat16)
seen = torch.from_numpy(np.asarray(Window(host))).view(torch.bfloat16)
host[2] = 7
print("row 2 through the window:", seen[2].tolist())
print("same address:", seen.data_ptr() == host.data_ptr())

# %% [markdown]
# For a GPU, the two steps are these lines. Nothing is copied, and the model's code stays as it is: it
# believes that its table is on the GPU.


# %%
def mapped(host):
    portable_and_mapped = 1 | 2
    code = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, portable_and_mapped)
    assert int(code) == 0, "the driver refused"
    return torch.as_tensor(Window(host), device="cuda").view(host.dtype)


# %% tags=["nbval-ignore-output"]
# says other things with a GPU than without, so it is not compared
if cuda:
    host = torch.randn(4096, width).bfloat16()
    ids = torch.randint(0, 4096, (1000,))
    seen = mapped(host)
    rows = torch.nn.functional.embedding(ids.cuda(), seen)
    print(f"a tensor on {seen.device}, same rows:", torch.equal(rows.cpu(), host[ids]))
    del seen
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
else:
    print("No CUDA GPU here: nothing was registered.")

# %% [markdown]
# What these lines lack is care: memory that is freed while registered, a forked process, a driver that
# refuses, a second GPU. [`pleviz/homes/registration.py`](../pleviz/homes/registration.py) has it.
#
# ## The home `file`: a row by hand
#
# A checkpoint in the safetensors format is simple enough to read without a library: 8 bytes that say how
# long the header is, the header in JSON, then the raw numbers of all tensors.

# %%
import json
import struct
import tempfile
from pathlib import Path

folder = tempfile.TemporaryDirectory()
model.save_pretrained(folder.name)
path = Path(folder.name) / "model.safetensors"
with path.open("rb") as file:
    length = struct.unpack("<Q", file.read(8))[0]
    header = json.loads(file.read(length))
entry = header[f"{table.name}.weight"]
print(f"header: {length:,} bytes, {len(header)} entries; the table's:\n{entry}")

# %% [markdown]
# `data_offsets` count from the end of the header. So the row of token 33 is at a place that we can compute,
# and `mmap` makes the file look like memory: only the pages that we touch are read from the disk.

# %%
import mmap

start = 8 + length + entry["data_offsets"][0] + 33 * table.row_nbytes
with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
    raw = memory[start : start + table.row_nbytes]
by_hand = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16)
print(f"{len(raw)} bytes from byte {start:,} on; equal to the model's row, bit for bit:")
print(torch.equal(by_hand.view(torch.int16), table.weight[33].view(torch.int16)))

# %% [markdown]
# The row in the file *is* the row of the model. So why have it in RAM a second time? The home `file` uses
# the map itself as the table. With CUDA those pages are registered too, read-only.

# %%
ids = torch.arange(3, 67)[None]
before = model(ids).logits
with pleviz.offload(model, "file", checkpoint=folder.name) as moved:
    print(f"home: {moved.home!r}, same logits: {torch.equal(before, model(ids).logits)}")
folder.cleanup()

# %% [markdown]
# ## Which home for your machine?
#
# The rule: change nothing if all fits. Otherwise move the table before you quantise, because moving is
# exact. `pleviz.advice.advise` applies it to the budget of each home and precision: the estimated peak of an
# 8,500-token prompt must fit on the GPU, and a table on the host must fit in RAM, next to 4 GB for the
# system. Choose a model with the buttons (a T4, the free GPU of Colab, has 15 GiB):

# %%
from pleviz.advice import advise

gpus, rams = (4, 6, 8, 10, 12, 15, 16, 24), (8, 16, 32)
views = {
    name: {
        (f"{gpu} GiB", f"{ram} GiB"): advise(name, gpu_bytes=gpu * 2**30, ram_bytes=ram * 2**30)
        for gpu in gpus
        for ram in rams
    }
    for name in reversed(pleviz.SPECS)
}
fig = plots_homes.home_grid(views, title="Precision and home, 8,500-token prompt, text model")
pleviz.show(fig, "03-grid")

# %% [markdown]
# Read a row from left to right: more RAM turns "does not fit" into a moved table. Read a column from top to
# bottom: with a bigger GPU first the quantisation goes, then the move. In words, for one card:

# %%
for ram in (8, 16):
    found = advise("gemma-4-E4B", gpu_bytes=12 * 2**30, ram_bytes=ram * 2**30)
    print(f"12 GiB GPU, {ram} GiB RAM: {found}")

# %% [markdown]
# And for the machine that this runs on:

# %% tags=["nbval-ignore-output"]
# another machine gets another answer, so it is not compared
import psutil

ram = psutil.virtual_memory().total
gpu = torch.cuda.get_device_properties(0).total_memory if cuda else None
print(advise("gemma-4-E4B", gpu_bytes=gpu, ram_bytes=ram) if gpu else "No CUDA GPU here.")

# %% [markdown]
# To load real weights that way, the table never touching the GPU (`nf4` and `int8` need bitsandbytes):
#
# ```python
# from pleviz.homes.loading import load
# model, processor = load("google/gemma-4-E4B-it", home="file", quantization="nf4")
# ```
#
# ## Exercises
#
# Replace `None`. A number in the unit asked for will do, or text with a unit, such as `"3.1 MB"`.
#
# **1.** Gemma 4 **E2B** (bf16) is loaded with its table on the CPU by `device_map` and writes 100 tokens. How
# many GB of the table cross the bus?

# %%
pleviz.check("03.1", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# b = pleviz.budget("gemma-4-E2B", home="device_map")
# pleviz.check("03.1", 100 * b.bytes_per_token / 1e9)
# ```
#
# </details>
#
# **2.** On a link of 12 GB/s, how many milliseconds does each of those tokens take at least?

# %%
pleviz.check("03.2", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# b = pleviz.budget("gemma-4-E2B", home="device_map")
# pleviz.check("03.2", 1e3 * b.bytes_per_token / 12e9)
# ```
#
# </details>
#
# **3.** How many MB lie between the start of E2B's table in its file and the row of token 1,000?

# %%
pleviz.check("03.3", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# row = pleviz.budget("gemma-4-E2B").row_bytes
# pleviz.check("03.3", 1000 * row / 1e6)
# ```
#
# </details>
#
# **4.** How many weights of Gemma 4 **E2B**'s table does a float16 copy change, if they are from N(0, 0.02²)?

# %%
pleviz.check("03.4", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# from pleviz.rounding import changed_by_fp16
#
# rows, width = pleviz.SPECS["gemma-4-E2B"].table_shape
# pleviz.check("03.4", changed_by_fp16(0.02) * rows * width)
# ```
#
# </details>
#
# **5.** You have just trained Gemma 4 E4B (bf16) and saved nothing yet. A 12 GiB NVIDIA card, 32 GiB of RAM:
# which home is the fastest that fits: `"gpu"`, `"mapped"`, `"file"` or `"cpu"`?

# %%
pleviz.check("03.5", None)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# from pleviz.advice import advise
#
# machine = {"gpu_bytes": 12 * 2**30, "ram_bytes": 32 * 2**30, "from_file": False}
# pleviz.check("03.5", advise("gemma-4-E4B", **machine).home)
# ```
#
# </details>
#
# Next: [is it really bit-identical?](04_parity.ipynb)

# %% tags=["nbval-ignore-output"]
# what this was run with: differs from machine to machine, so it is not compared
from pleviz.notebook import stamp

stamp()
