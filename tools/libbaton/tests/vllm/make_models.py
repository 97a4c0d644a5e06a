"""Makes a model for vLLM, in the format of Hugging Face.

    make_models.py DIR                random weights, and a tokenizer of single bytes
    make_models.py DIR --fat          the same with 112 KiB of KV for each token, in 16 bits
    make_models.py DIR --gguf FILE    the weights and the tokenizer of a GGUF

The random weights are the same in each run. They are wide, so that the answer depends on all of
the prompt: the KV of another prompt gives another answer.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast)

WIDTH = 0.12
CHAT = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}<|im_start|>assistant\n")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def bytes_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0],
                                   chat_template=CHAT)


def random_model(is_fat):
    tokenizer = bytes_tokenizer()
    torch.manual_seed(0)
    layers, heads, kv_heads, head_dim = (28, 8, 8, 128) if is_fat else (2, 4, 2, 64)
    return tokenizer, LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, max_position_embeddings=8192, tie_word_embeddings=False,
        initializer_range=WIDTH, bos_token_id=None, eos_token_id=256))


def gguf_model(path):
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain by now, so they can be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return AutoTokenizer.from_pretrained(**source), model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--fat", action="store_true")
    parser.add_argument("--gguf", type=Path)
    options = parser.parse_args()
    tokenizer, model = (
        gguf_model(options.gguf) if options.gguf else random_model(options.fat))
    tokenizer.save_pretrained(options.directory)
    model.to(torch.bfloat16).save_pretrained(options.directory)


if __name__ == "__main__":
    main()
