"""Our decoder against transformers in float32, on tiny random models of every family, loaded through the loader."""

from __future__ import annotations

import pytest
import torch

from tests.unit.models.tiny import FAMILIES, make_engine, make_model, reference_logits, some_tokens

TOLERANCE = 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_every_position_match_transformers_whole_chunked_and_decoded(family, tmp_path):
    model = make_model(family, tmp_path)
    engine = make_engine(tmp_path)
    tokens = some_tokens(40, seed=1)
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.5, "the random weights must move the logits, else any decoder passes"

    (whole,) = engine.step([("whole", tokens)])
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)

    pieces = [engine.step([("pieces", tokens[start:stop])])[0] for start, stop in [(0, 5), (5, 18), (18, 19), (19, 33)]]
    pieces += [engine.step([("pieces", [token])])[0] for token in tokens[33:]]
    torch.testing.assert_close(torch.cat(pieces), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_of_chunks_and_decodes_match_transformers(family, tmp_path):
    model = make_model(family, tmp_path)
    engine = make_engine(tmp_path)
    prompts = {f"r{index}": some_tokens(length, seed=index) for index, length in enumerate([30, 7, 45, 1, 16])}
    seen = {rid: [] for rid in prompts}
    chunks = {"r0": [10, 1, 1, 12, 6], "r1": [3, 1, 1, 1, 1], "r2": [20, 20, 1, 1, 3], "r3": [1], "r4": [1, 1, 11, 1, 2]}
    for index in range(5):
        rows = []
        for rid, counts in chunks.items():
            if index < len(counts):
                done = sum(counts[:index])
                rows.append((rid, prompts[rid][done : done + counts[index]]))
        rows.sort(key=lambda row: (index + int(row[0][1])) % 5)
        for (rid, _), logits in zip(rows, engine.step(rows), strict=True):
            seen[rid].append(logits)
    for rid, tokens in prompts.items():
        torch.testing.assert_close(torch.cat(seen[rid]), reference_logits(model, tokens), atol=TOLERANCE, rtol=0, msg=rid)


def test_logits_come_for_the_asked_rows_alone_in_their_order(tmp_path):
    model = make_model("llama2", tmp_path)
    tokens = some_tokens(6, seed=3)
    logits = make_engine(tmp_path).run([("a", tokens)], logits_rows=[5, 2])
    torch.testing.assert_close(logits, reference_logits(model, tokens)[[5, 2]], atol=TOLERANCE, rtol=0)


def test_a_chunk_that_needs_no_logits_gives_none_and_still_writes_its_keys(tmp_path):
    model = make_model("llama2", tmp_path)
    tokens = some_tokens(9, seed=3)
    engine = make_engine(tmp_path)
    nothing = engine.run([("a", tokens[:6])], logits_rows=[])
    assert nothing.shape == (0, 128) and nothing.dtype == torch.float32
    (rest,) = engine.step([("a", tokens[6:])])
    torch.testing.assert_close(rest, reference_logits(model, tokens)[6:], atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_as_close_to_float32_as_transformers_does(tmp_path):
    tokens = some_tokens(40, seed=5)
    exact = reference_logits(make_model("llama3", tmp_path / "f32"), tokens)
    theirs = reference_logits(make_model("llama3", tmp_path / "bf16", dtype=torch.bfloat16), tokens)
    (ours,) = make_engine(tmp_path / "bf16", dtype=torch.bfloat16).step([("a", tokens)])
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_left_in_a_reused_page_reaches_no_other_request(dtype, tmp_path):
    make_model("mistral", tmp_path, dtype=dtype)
    engine = make_engine(tmp_path, dtype=dtype, num_pages=24)
    first, second = some_tokens(13, seed=1), some_tokens(9, seed=2)
    clean = [logits.clone() for logits in engine.step([("a", first), ("b", second)])]
    engine.step([("poison", some_tokens(23, seed=3))])
    engine.finish("a")
    engine.finish("b")
    engine.finish("poison")
    cache = engine.cache
    cache.k[:, : cache.num_pages] = float("nan")
    cache.v[:, : cache.num_pages] = float("nan")
    again = engine.step([("c", first), ("d", second)])
    for before, after in zip(clean, again, strict=True):
        assert torch.equal(before, after)
    follow = engine.step([("c", [1]), ("d", [2]), ("e", some_tokens(3, seed=4))])
    assert all(logits.isfinite().all() for logits in follow)


def test_a_row_full_of_nan_leaves_the_other_rows_of_its_step_alone(tmp_path):
    make_model("qwen3", tmp_path)
    engine = make_engine(tmp_path)
    engine.step([("bad", some_tokens(9, seed=1)), ("good", some_tokens(12, seed=2))])
    before = engine.step([("bad", [3]), ("good", [4])])[1]
    engine.lengths.update(bad=9, good=12)
    for page in engine.tables["bad"]:
        engine.cache.v[:, page] = float("nan")
    bad, good = engine.step([("bad", [3]), ("good", [4])])
    assert bad.isnan().any() and torch.equal(good, before)
