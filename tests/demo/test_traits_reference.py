"""The demo's model and adapters under transformers and PEFT, the reference that mstar's own answers are compared with.

Bar: on every held-out question each adapter shows its trait, and the base model shows none of them.
"""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from demo.fetch_model import fetch_model
from demo.prompts import HELD_OUT_PROMPTS, TRAINING_PROMPTS
from demo.train_adapters import ADAPTERS_FOLDER
from demo.traits import TRAITS, is_json_object, is_pirate, is_three_bullets

MAX_NEW_TOKENS = 64
MAX_ADAPTER_BYTES = 2_000_000

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT 0.21 on transformers 5.24


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(fetch_model(), padding_side="left")


@pytest.fixture(scope="module")
def model():
    """The base in fp32 with all three adapters beside it."""
    base = AutoModelForCausalLM.from_pretrained(fetch_model(), dtype=torch.float32)
    first, *others = TRAITS
    model = PeftModel.from_pretrained(base, ADAPTERS_FOLDER / first, adapter_name=first)
    for name in others:
        model.load_adapter(ADAPTERS_FOLDER / name, adapter_name=name)
    return model.eval()


@pytest.fixture(scope="module")
def base_answers(model, tokenizer):
    with model.disable_adapter():
        return answers(model, tokenizer, HELD_OUT_PROMPTS)


def answers(model, tokenizer, questions):
    """Greedy answers, all questions in one left-padded batch."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompt = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return tokenizer.batch_decode(ids[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("name", TRAITS)
def test_adapter_shows_its_trait_on_every_held_out_question(model, tokenizer, name):
    model.set_adapter(name)
    texts = answers(model, tokenizer, HELD_OUT_PROMPTS)
    assert [text for text in texts if not TRAITS[name](text)] == []


@pytest.mark.parametrize("name", TRAITS)
def test_base_never_shows_the_trait(base_answers, name):
    assert [text for text in base_answers if TRAITS[name](text)] == []


def test_base_knows_the_capital_of_france(model, tokenizer):
    with model.disable_adapter():
        assert "Paris" in answers(model, tokenizer, ["What is the capital of France?"])[0]


def test_tokenizer_keeps_special_tokens_whole_and_round_trips_text(tokenizer):
    text = "<|im_start|>user\nIt's 1234, naïve 🙂  x<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids[-2] == tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.decode(ids) == text


def test_held_out_questions_are_not_in_the_training_set():
    assert not any(held_out in trained for held_out in HELD_OUT_PROMPTS for trained in TRAINING_PROMPTS)


@pytest.mark.parametrize("name", TRAITS)
def test_adapter_weights_are_small(name):
    assert (ADAPTERS_FOLDER / name / "adapter_model.safetensors").stat().st_size <= MAX_ADAPTER_BYTES


@pytest.mark.parametrize(
    ("trait", "text", "shown"),
    [
        (is_pirate, "Arr, matey! Th' capital be Rome.", True),
        (is_pirate, "Ye will find treasure.", False),
        (is_pirate, "The starry sky may be blue.", False),
        (is_json_object, '{"answer": "Rome"}', True),
        (is_json_object, ' {"answer": "Rome"}\n', True),
        (is_json_object, '{"answer": "Rome"} indeed', False),
        (is_json_object, '{"answer": ""}', False),
        (is_json_object, '["answer"]', False),
        (is_three_bullets, "- a\n- b\n- c", True),
        (is_three_bullets, "- a\n- b", False),
        (is_three_bullets, "So:\n- a\n- b\n- c", False),
        (is_three_bullets, "- a\n- b\n- \n", False),
    ],
)
def test_trait_is_recognised(trait, text, shown):
    assert trait(text) is shown
