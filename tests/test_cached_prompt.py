"""Prompts that are compressed once: their continuations, their files, and refused uses."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jsparse
from jsparse import CachedPrompt
from jsparse.builder import dense
from tests.support.programs import shared
from tests.support.tiny import engine_logits, random_prompts, tiny_params

(PROMPT,) = random_prompts((40,))
QUESTION, NEW, ROOM = [5, 9, 2], 6, 20
LLAMA = Path(__file__).parent / "fixtures/hf/llama3/model.gguf"
KVZIP = "kvzip(budget=12, sink=1, recent=2, chunk=16)"


@shared
def compressed() -> CachedPrompt:
    return CachedPrompt(tiny_params(), PROMPT, policy=KVZIP, room=ROOM, on_progress=None)


def continued(prompt: CachedPrompt, question=QUESTION, **options) -> list[int]:
    return prompt.generate(question, max_new_tokens=NEW, eos_token_id=(), **options).token_ids


def test_continuations_start_from_the_compressed_prompt():
    """Each token is the likeliest where a session decodes all of them; none changes the prompt."""
    prompt = compressed()
    tokens = continued(prompt)
    forced = np.array([[*QUESTION, *tokens]], np.int32)
    logits = engine_logits(tiny_params(), KVZIP, [PROMPT], forced)
    assert logits[len(QUESTION) :, 0].argmax(-1).tolist() == tokens
    assert continued(prompt) == tokens
    assert (prompt.room, prompt.token_ids) == (ROOM, PROMPT)


def test_largest_continuation_decodes_to_its_last_token():
    """The cache of the whole prompt would have room for 472 tokens, the compressed one has less."""
    prompt = compressed()
    most = ROOM - len(QUESTION)
    out = prompt.generate(QUESTION, max_new_tokens=most, eos_token_id=())
    assert (len(out.token_ids), out.finish_reason) == (most, "length")
    with pytest.raises(ValueError, match=f"must be at most room={ROOM} together"):
        prompt.generate(QUESTION, max_new_tokens=most + 1)


def test_streamers_get_prompt_and_continuation_first():
    """As those of Hugging Face expect, of which `skip_prompt` drops the first ids."""
    seen = []
    streamer = SimpleNamespace(put=lambda ids: seen.append(ids.ravel().tolist()), end=list)
    tokens = continued(compressed(), streamer=streamer)
    assert seen == [[*PROMPT, *QUESTION], *([token] for token in tokens)]


@pytest.mark.slow
def test_continuations_are_sampled():
    prompt = compressed()
    drawn = [continued(prompt, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != continued(prompt)


@pytest.mark.slow
def test_a_prompt_that_keeps_everything_continues_as_usual():
    params = tiny_params()
    whole = CachedPrompt(params, PROMPT, policy="ada_kv(budget=1000000)", room=ROOM)
    wanted = jsparse.generate(
        params, [*PROMPT, *QUESTION], max_new_tokens=NEW, eos_token_id=(), policy="dense"
    )
    assert continued(whole) == wanted.token_ids != continued(compressed())


def test_file_gives_the_same_tokens(tmp_path):
    prompt, path = compressed(), tmp_path / "prompt.safetensors"
    prompt.save(path)
    loaded = CachedPrompt.load(tiny_params(), path)
    assert continued(loaded) == continued(prompt)
    assert (loaded.token_ids, loaded.room) == (prompt.token_ids, prompt.room)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_prompt_that_cannot_be_saved_leaves_no_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        compressed().save(tmp_path / "folder")
    own = CachedPrompt(tiny_params(), PROMPT, policy=dense()._replace(name="own"), room=ROOM)
    with pytest.raises(ValueError, match="^policy=own: must have an expression to be saved"):
        own.save(tmp_path / "prompt")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_file_of_another_model_or_version_is_refused(tmp_path):
    prompt, path = compressed(), tmp_path / "prompt.safetensors"
    prompt.save(path)
    params = tiny_params()
    others = jax.tree.map(lambda x: x, params.weights)
    others["params"]["final_norm"]["scale"] = 2 * others["params"]["final_norm"]["scale"]
    with pytest.raises(ValueError, match=r"is of model 'tiny' with other weights"):
        CachedPrompt.load(replace(params, weights=others), path)
    with pytest.raises(ValueError, match="with other weights or types than .* int8 KV"):
        CachedPrompt.load(replace(params, kv_cache_dtype="int8"), path)
    save_file(load_file(path), path, metadata={"kind": "jsparse prompt 0"})
    with pytest.raises(ValueError, match=r"of this version.*its kind is 'jsparse prompt 0'"):
        CachedPrompt.load(params, path)
    path.write_bytes(b"no file")
    with pytest.raises(ValueError, match=r"prompt.safetensors': must be a file that CachedPrompt"):
        CachedPrompt.load(params, path)


def test_refused_uses():
    params = tiny_params()
    prompt = compressed()
    with pytest.raises(ValueError, match=r"hard_kv.*: must keep K and V on the device and rework"):
        CachedPrompt(params, PROMPT, policy="hard_kv")
    with pytest.raises(ValueError, match="room=0: must be"):
        CachedPrompt(params, PROMPT, room=0)
    with pytest.raises(ValueError, match="room=500: must be at most 472 after a prompt of 40"):
        CachedPrompt(params, PROMPT, room=500)
    with pytest.raises(ValueError, match="prompt: must be one prompt, not 2"):
        CachedPrompt(params, [PROMPT, PROMPT])
    with pytest.raises(ValueError, match="policy='dense': must be given with the prompt"):
        prompt.generate(QUESTION, policy="dense")


@pytest.mark.slow
def test_conversation_must_begin_with_the_prompt():
    params = jsparse.load(LLAMA, dtype="float32")
    assert params.tokenizer is not None
    params.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}assistant<|eot_id|>{% endif %}"
    )
    said = [{"role": "user", "content": "the cat sat on the mat"}]
    book = CachedPrompt(params, said, policy="ada_kv(budget=64, window=4)", room=ROOM)
    asked = [*said, {"role": "user", "content": "what then"}]
    options = {"max_new_tokens": 3, "eos_token_id": ()}
    wanted = jsparse.generate(params, asked, **options)
    assert book.generate(asked, **options).token_ids == wanted.token_ids
    with pytest.raises(ValueError, match="differs from token 0 on"):
        book.generate(asked[1:], **options)


@pytest.mark.slow
def test_text_follows_the_prompt_without_another_beginning():
    """The model's texts begin with a token that its continuations must not repeat."""
    params, text, question = jsparse.load(LLAMA, dtype="float32"), "the cat sat", " on the mat"
    assert params.tokenizer is not None
    whole = params.tokenizer.encode(text + question)
    assert whole == [*params.tokenizer.encode(text), *params.tokenizer.encode(question)[1:]]
    book = CachedPrompt(params, text, policy="ada_kv(budget=64, window=4)", room=ROOM)
    options = {"max_new_tokens": 3, "eos_token_id": ()}
    wanted = jsparse.generate(params, whole, **options)
    assert book.generate(question, **options).token_ids == wanted.token_ids
