"""Arena tensors are apart, zeroed and aligned; activations reuse only what nobody holds."""

from __future__ import annotations

import torch

from headwater.numerics.cpu_memory import Activations, Arena, Scratch


def test_arena_tensors_are_zeroed_aligned_and_do_not_overlap() -> None:
    arena = Arena()
    tensors = [
        arena.zeros((3, size), dtype)
        for size in (1, 7, 1000, 9_000_000)
        for dtype in (torch.int8, torch.bfloat16, torch.float32)
    ]
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
        assert tensor.count_nonzero() == 0
        tensor.fill_(i + 1)
    for i, tensor in enumerate(tensors):
        assert bool((tensor == i + 1).all())


def test_a_large_activation_is_reused_only_when_no_view_of_it_is_left() -> None:
    activations = Activations()
    first = activations.empty((1024, 1024), torch.bfloat16)
    view, address = first[5:6], first.data_ptr()
    del first
    second = activations.empty((1024, 1024), torch.bfloat16)
    assert second.data_ptr() != address
    del view
    third = activations.empty((512, 1024), torch.float32)
    assert third.data_ptr() == address


def test_small_activations_are_plain_tensors_of_the_asked_shape() -> None:
    small = Activations().empty((3, 5), torch.float32)
    assert small.shape == (3, 5)
    assert small.dtype == torch.float32


def test_scratch_grows_and_keeps_one_buffer_per_purpose() -> None:
    scratch = Scratch()
    first = scratch.address("a", 1000)
    assert scratch.address("a", 100) == first
    assert scratch.address("b", 100) != first
    assert scratch.bytes("a", 10_000_000).numel() >= 10_000_000
