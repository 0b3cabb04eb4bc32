"""Bookkeeping of page-locked memory, against a driver that only counts (the GPU tests use the real one)."""

from __future__ import annotations

import contextlib
import copy
import gc
import os

import pytest
import torch

import pleviz
from pleviz.homes import RegistrationError, registered_bytes, registration
from pleviz.homes.home import CpuHome, attach
from pleviz.homes.registration import HostView, empty_pages
from tests.test_homes import logits, make
from tests.test_homes_lifecycle import BOTH


class Driver:
    """Stands for the CUDA runtime: registers each address once, as the real one does."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.calls: list[str] = []
        self.refuse = False

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append("register")
        if self.refuse or address in self.live:
            return 712
        self.live[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        self.calls.append("unregister")
        return 0 if self.live.pop(address, None) else 713

    def cudaGetErrorString(self, code):
        return f"error {code}"


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    monkeypatch.setattr(registration, "_clear_cuda_error", lambda device: None)
    gc.collect()
    yield fake
    gc.collect()
    assert not fake.live and registered_bytes() == 0


CUDA = torch.device("cuda", 0)


def test_one_registration_serves_all_views_and_outlives_the_first(driver):
    host = empty_pages((8, 16), torch.float32)
    first = HostView(host, CUDA)
    assert driver.live == {host.data_ptr(): 512} and registered_bytes() == 512
    second = HostView(host, CUDA)
    third = HostView(host[:2], CUDA)
    assert driver.calls == ["register"]
    del first
    gc.collect()
    assert registered_bytes() == 512 and driver.live  # the GPU still reads it through the second
    del second
    assert registered_bytes() == 512
    del third
    assert registered_bytes() == 0 and driver.calls == ["register", "unregister"]


def test_a_registration_keeps_its_memory(driver):
    host = empty_pages((8, 16), torch.float32)
    view = HostView(host, CUDA)
    address = host.data_ptr()
    del host
    gc.collect()
    assert view.host.data_ptr() == address in driver.live


def test_a_refused_registration_leaves_no_trace(driver):
    host = empty_pages((8, 16), torch.float32)
    driver.refuse = True
    with pytest.raises(RegistrationError, match=r"512 bytes failed.*712"):
        HostView(host, CUDA)
    gc.collect()
    assert registered_bytes() == 0 and driver.calls == ["register"]
    driver.refuse = False
    view = HostView(host, CUDA)
    assert registered_bytes() == 512
    del view


@pytest.mark.parametrize("done", [False, True])
def test_an_interrupt_while_registering_leaks_nothing(driver, done, monkeypatch, recwarn):
    host = empty_pages((8, 16), torch.float32)
    real = driver.cudaHostRegister

    def interrupted(*args):
        if done:
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(driver, "cudaHostRegister", interrupted)
        HostView(host, CUDA)
    gc.collect()
    assert registered_bytes() == 0 and not driver.live
    assert not [w for w in recwarn if "pleviz" in str(w.message)]


def test_a_forked_child_leaves_the_parents_registration_alone(driver, monkeypatch):
    host = empty_pages((8, 16), torch.float32)
    view = HostView(host, CUDA)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        registration._unregister(host.data_ptr(), host, 0)
    assert driver.live and registered_bytes() == 512
    del view


def cast(module):
    module._home.follow(module, torch.float64, CUDA)
    module._home.follow(module, torch.float32, CUDA)


def replace(module):
    module.weight = torch.nn.Parameter(module.weight.detach().clone())


def rewrite(module):
    module.weight.data = module.weight.detach().clone()
    module(torch.tensor([[1]]))


def copied(module):
    return copy.deepcopy(module)


@BOTH
@pytest.mark.parametrize("change", [cast, replace, rewrite, copied])
def test_a_refusal_later_on_falls_back_to_gathering(kind, change, monkeypatch):
    """The table is mapped; then a cast, another tensor or a copy cannot be page-locked."""
    model = make(kind)
    expected = logits(model)
    table = pleviz.find_table(model)
    place = "pleviz.homes.home.map_to_device"
    monkeypatch.setattr(place, lambda host, device, read_only: host.view_as(host))
    attach(table.module, "mapped", CUDA)
    assert torch.equal(logits(model), expected) and pleviz.home_of(model) == "mapped"

    def refuse(host, device, read_only):
        raise RegistrationError("no more memory may be locked")

    monkeypatch.setattr(place, refuse)
    with pytest.warns(UserWarning, match="gathered on the CPU: no more memory may be locked"):
        twin = change(table.module)
    if twin is not None:
        assert pleviz.home_of(model) == "mapped" and torch.equal(logits(model), expected)
        table.owner.embed_tokens_per_layer = twin
    module = pleviz.find_table(model).module
    assert isinstance(module._home, CpuHome) and module._home.parameter is module.weight
    module._home.device = torch.device("cpu")
    assert torch.equal(logits(model), expected)
    pleviz.restore(model)
    assert torch.equal(logits(model), expected) and module.weight.requires_grad
