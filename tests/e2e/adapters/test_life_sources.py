"""Where adapters come from, over HTTP: `lora_dir` by name, the hub by id; what lies beside them; `mstar adapters` against the server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading

import pytest
from typer.testing import CliRunner

from mstar.adapters.cli import app
from tests.e2e.adapters.conftest import WEIGHTS
from tests.e2e.prompts import greedy, some_tokens
from tests.e2e.specs import ADMIN_KEY
from tests.support.client import TokenStream, ask_together, new_client
from tests.support.server import BASE
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.xdist_group("adapter-life")
TEMPLATE = "{% for m in messages %}hello {{ m['content'] }} and one{% endfor %}"
HELLO = [{"role": "user", "content": "two"}]


@pytest.fixture
def lazy(life):
    """`shop` in the lora_dir, with the weights of `extra`."""
    folder = life.lora_dir / "shop"
    shutil.copytree(life.folders["extra"], folder)
    yield folder
    shutil.rmtree(folder)


def ask(life, name, num_tokens=4):
    return life.server.post("/v1/completions", greedy(name, some_tokens(6, 300), num_tokens).body())


def test_the_first_requests_on_a_folder_of_lora_dir_load_it_once_and_all_are_answered(life, lazy):
    assert "shop" not in life.server.get("/v1/models").text
    assert life.server.get("/v1/models/shop").status_code == 404, "looking is not loading"
    answers = ask_together(life.server, [greedy("shop", some_tokens(8, 301), 8) for _ in range(12)])
    for answer in answers:
        life.reference.check_greedy(answer.ask.prompt, answer.token_ids, "extra", answer.logprobs)
    assert life.names() == ["shop"] and life.server.get("/v1/models/shop").json()["root"] == str(lazy)
    chat = {"model": f"{BASE}:shop", "messages": HELLO, "max_tokens": 2, "temperature": 0}
    assert life.server.post("/v1/chat/completions", chat).status_code == 200
    assert life.unload("shop").status_code == 200
    assert life.server.post("/tokenize", {"model": "shop", "prompt": "hello"}).status_code == 200
    assert life.names() == ["shop"], "after an unload the next request loads it again"


def test_c19_an_unusable_folder_is_the_requests_own_4xx_and_loads_after_its_repair(life, lazy):
    config = (lazy / "adapter_config.json").read_text()
    (lazy / "adapter_config.json").unlink()
    life.refused(ask(life, "shop"), 400, "adapter_config_missing")
    fields = json.loads(config)
    del fields["peft_type"]
    (lazy / "adapter_config.json").write_text(json.dumps(fields))
    assert "`peft_type` is missing" in life.refused(ask(life, "shop"), 400, "adapter_config_invalid")
    (lazy / "adapter_config.json").write_text(config)
    life.faults.fail(1, lazy)
    life.refused(ask(life, "shop"), 400, "adapter_unreadable")
    assert life.names() == []
    life.faults.mend()
    life.answers_with("shop", "extra", some_tokens(8, 302))


def test_names_that_lead_elsewhere_or_nowhere_are_404(life, lazy):
    (life.lora_dir / ".secret").mkdir(exist_ok=True)
    outside = os.path.relpath(life.folders["extra"], life.lora_dir)
    unknown = life.server.metric("mstar_unknown_model_requests_total")
    names = ("nope", ".secret", "..", "../shop", "shop/", "shop/../shop", outside, str(lazy), "a\\b", "x\0", "")
    for name in names:
        life.refused(ask(life, name), 404, "model_not_found")
    assert life.names() == [] and life.server.metric("mstar_unknown_model_requests_total") == unknown + len(names)


def test_c75_a_lazy_load_stalls_no_running_stream(life, lazy):
    life.faults.hold(1, lazy)

    async def run():
        async with new_client(life.server) as client:
            first = asyncio.ensure_future(client.post("/v1/completions", json=greedy("shop", (5, 6), 2).body()))
            await asyncio.to_thread(life.faults.wait_held, 1)
            answer = await TokenStream(client, greedy(BASE, some_tokens(9, 303), 60)).read()
            assert not first.done()
            life.faults.mend()
            assert (await first).status_code == 200
            return answer

    life.reference.check(asyncio.run(run()))


def test_adapters_come_from_the_hub_by_id_and_revision(life):
    life.hub.publish("org/extra", life.folders["extra"], **{"optimizer.pt": b"a pickle", "README.md": b"much"})
    life.hub.publish("org/extra", life.folders["rank64"], "v2")
    life.loaded("main", "org/extra")
    life.loaded("second", "org/extra@v2")
    life.answers_with("main", "extra", some_tokens(9, 304))
    life.answers_with("second", "rank64", some_tokens(9, 304))
    card = life.server.get("/v1/models/second").json()
    assert card["root"] == "org/extra@v2"
    assert set(life.hub.fetched()) == {"adapter_config.json", WEIGHTS}
    log = life.server.log_path.read_text()
    assert "hub: fetching org/extra" in log and "hub: org/extra@v2 is in" in log


def test_a_new_commit_on_the_hub_replaces_in_place_and_refusals_name_what_is_wrong(life):
    life.hub.publish("org/moving", life.folders["extra"])
    life.loaded("x", "org/moving")
    life.hub.publish("org/moving", life.folders["rank64"])
    life.refused(life.load("x", "org/moving"), 409, "adapter_already_loaded")
    life.loaded("x", "org/moving", load_inplace=True)
    life.answers_with("x", "rank64", some_tokens(9, 305))
    assert "org/nope" in life.refused(life.load("y", "org/nope"), 404, "adapter_hub_not_found")
    assert "v9" in life.refused(life.load("y", "org/moving@v9"), 404, "adapter_hub_not_found")
    life.hub.publish("org/model", life.lora_dir, **{"model.safetensors": b"x"})
    life.refused(life.load("y", "org/model"), 400, "adapter_hub_no_adapter")
    life.hub.publish("org/cut", life.folders["extra"], **{WEIGHTS: b"cut"})
    life.refused(life.load("y", "org/cut"), 400, "adapter_file_invalid")
    life.hub.failing = 503
    life.loaded("z", "org/moving")  # from the cache
    life.refused(life.load("y", "org/elsewhere"), 503, "adapter_hub_unreachable")
    assert life.names() == ["x", "z"]


def test_a_slow_hub_stalls_nothing(life):
    life.hub.publish("org/slow", life.folders["rank1"])
    life.hub.hold = threading.Event()

    async def run():
        async with new_client(life.server) as client:
            loading = asyncio.ensure_future(asyncio.to_thread(life.load, "x", "org/slow"))
            answer = await TokenStream(client, greedy("rank1", some_tokens(9, 306), 40)).read()
            assert not loading.done()
            life.hub.hold.set()
            assert (await loading).status_code == 200
            return answer

    life.reference.check(asyncio.run(run()))
    life.hub.hold = None


def test_an_adapters_own_chat_template_makes_its_prompts_and_nobody_elses(life):
    folder = life.copy("extra", "templated")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    life.loaded("x", folder)

    def prompt_of(model):
        body = {"model": model, "messages": HELLO, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = life.server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        asked = answer.json()
        tokens = life.server.post("/tokenize", {"model": model, "messages": HELLO}).json()["tokens"]
        assert asked["prompt_token_ids"] == tokens
        return tokens, asked["choices"][0]["token_ids"]

    own, output = prompt_of("x")
    assert life.server.post("/detokenize", {"tokens": own}).json()["prompt"] == "hello two and one"
    life.reference.check_greedy(own, output, "extra")
    base, _ = prompt_of(BASE)
    assert life.server.post("/detokenize", {"tokens": base}).json()["prompt"].startswith("<|im_start|>user\ntwo<|im_end|>")
    assert prompt_of("rank1")[0] == base
    (folder / "chat_template.jinja").write_text("again {{ messages[0]['content'] }}")
    assert "another chat template" in life.refused(life.load("x", folder), 409, "adapter_already_loaded")
    life.loaded("x", folder, load_inplace=True)
    assert life.server.post("/detokenize", {"tokens": prompt_of("x")[0]}).json()["prompt"] == "again two"


def test_an_adapter_with_tokens_of_its_own_is_refused_and_one_that_lists_the_bases_is_not(life):
    folder = life.copy("extra", "tokens")
    known = {"1": {"content": "<|im_start|>"}, "2": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": known}))
    life.loaded("x", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {**known, "99": {"content": "<|tool|>"}}}))
    message = life.refused(life.load("y", folder), 400, "adapter_added_tokens")
    assert 'adds "<|tool|>" with the id 99, which the served tokenizer does not have' in message


# `mstar adapters`


def mstar_adapters(life, *argv):
    """The command, in this process: exit code, stdout, stderr."""
    env = {"MSTAR_URL": life.server.url, "MSTAR_ADMIN_KEY": ADMIN_KEY, "COLUMNS": "200"}
    result = CliRunner().invoke(app, [*map(str, argv)], env=env)
    assert isinstance(result.exception, SystemExit | None), result.exc_info
    return result.exit_code, result.stdout, result.stderr


def test_the_command_loads_lists_pins_and_unloads(life):
    folder = life.folders["extra"]
    assert mstar_adapters(life, "load", "x", folder)[:2] == (0, f"x is served from {folder}\n")
    assert mstar_adapters(life, "pin", "x")[0] == 0
    life.answers_with("x", "extra", some_tokens(9, 307))
    code, out, _ = mstar_adapters(life, "ls", "--json")
    rows = {row["name"]: row for row in json.loads(out)["adapters"]}
    assert code == 0 and len(rows) == 7
    assert rows["x"]["pinned"] and rows["x"]["slot"] in (1, 2) and rows["x"]["in_host_memory"] and rows["x"]["path"] == str(folder)
    code, out, _ = mstar_adapters(life, "ls")
    assert code == 0 and "7 adapters" in out and f"slot {rows['x']['slot']}, pinned" in out
    code, out, error = mstar_adapters(life, "load", "x", life.folders["rank64"])
    assert (code, out) == (1, "") and error.startswith("refused: lora_name 'x' is served already with other weights")
    code, out, _ = mstar_adapters(life, "load", "x", life.folders["rank64"], "--inplace", "--json")
    assert code == 0 and json.loads(out) == {"name": "x", "loaded": True}
    assert mstar_adapters(life, "unpin", "x")[0] == mstar_adapters(life, "unload", "x")[0] == 0
    code, out, _ = mstar_adapters(life, "unload", "x", "--json")
    assert code == 1 and json.loads(out)["error"]["code"] == "adapter_not_found"
    code, _, error = mstar_adapters(life, "unload", "x", "--admin-key", "wrong")
    assert code == 1 and "admin key" in error
    assert mstar_adapters(life, "ls", "--url", "http://127.0.0.1:9")[0] == 3


def test_check_says_what_the_server_says_word_for_word(life):
    good, nan = life.folders["rank33-mixed"], life.copy("extra", "cut-off")
    with (nan / WEIGHTS).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x00\xc0\x7f")
    wide = life.copy("rank64", "renamed")
    (wide / "adapter_config.json").write_text((wide / "adapter_config.json").read_text().replace('"r": 64', '"r": 32'))
    model = ("--model", tiny_model("llama2"))
    code, out, _ = mstar_adapters(life, "check", good, *model, "--json")
    assert code == 0 and json.loads(out)["served"] is True and json.loads(out)["max_rank"] == 33
    for folder, refusal in ((nan, "adapter_non_finite"), (wide, "adapter_rank_mismatch")):
        served = life.load("y", folder).json()["error"]
        code, out, _ = mstar_adapters(life, "check", folder, *model, "--json")
        said = json.loads(out)
        assert code == 1 and said["served"] is False
        assert said["error"] == {"message": served["message"], "code": served["code"]} and served["code"] == refusal
