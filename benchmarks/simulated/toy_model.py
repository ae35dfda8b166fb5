"""Model of the toy tasks: a tiny random Llama with a small vocabulary of one token per word."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from compound.engines.models import hide_progress_bars
from compound.execution.rng import fork_torch_rng

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PLACES = ("north", "east", "south", "west")
COLOURS = ("red", "blue", "green", "gold")
ANIMALS = ("cat", "dog", "cow", "hen")
FRUITS = ("pear", "plum", "fig", "lime")
ASK, ANSWER, NOTHING = "ask", "answer", "nothing"
SAID = (ASK, ANSWER, *PLACES)
_FRAME = ("Word:", "Before:", "Heard:", "Found:", "Fact:", "Say:", NOTHING)
VOCABULARY = ("<unk>", "<end>", *SAID, *COLOURS, *ANIMALS, *FRUITS, *_FRAME)
_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
WIDTH, READ = (
    64,
    24,
)  # width of the residual stream, and of its last part, which the output head reads


def make_toy_model(folder: Path, seed: int = 0) -> Path:
    """Save the model and its tokenizer.

    The weights are random, with exceptions that make a task of a few words learnable in a hundred
    steps: word embeddings are orthogonal; embeddings of words that only frame a prompt are small;
    the last coordinate is equal for all words, and makes words outside the answer vocabulary
    improbable; and the base writes little into the coordinates that select the words of `SAID`, so
    that an adapter decides between them.

    Args:
        folder: the target folder, created if missing.
        seed: the seed of the weights.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(folder)
    with fork_torch_rng(seed, "toy model"), hide_progress_bars():
        _random_model().save_pretrained(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def _random_model() -> PreTrainedModel:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    end = VOCABULARY.index("<end>")
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=WIDTH**-0.5,
        tie_word_embeddings=False,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        words, head = model.model.embed_tokens.weight, model.lm_head.weight
        torch.nn.init.orthogonal_(words[:, :-READ], gain=(WIDTH - READ) ** 0.5)
        words[[VOCABULARY.index(word) for word in _FRAME]] *= 0.3
        words[:, -READ:] = 0.0
        words[:, -1] = 4.0
        for layer in model.model.layers:
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                out.weight[-READ:] *= 0.1
                out.weight[-1] = 0.0
        head[:] = 0.0
        torch.nn.init.orthogonal_(head[:, -READ:-1], gain=READ**0.5 / 2)
        spoken = torch.tensor([word in SAID for word in VOCABULARY])
        head[:, -1] = torch.where(spoken, 0.0, -2.0)
    return model
