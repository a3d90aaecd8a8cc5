"""Simulated runs: no torch threads (a run is thousands of tiny tensors), no log of reads that fail on purpose."""

from __future__ import annotations

import logging

import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet_and_single_threaded():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(before)
