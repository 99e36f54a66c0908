"""Makes what docs/finetune.md takes for granted, small: ``models/qwen`` and ``chats.jsonl``, in seconds.

``python docs/examples/tiny_chat.py [FOLDER]``. The model is a Qwen2 of 0.3 million random weights, its
tokenizer is trained on the 200 chats. These teach it six answers, which are all that it will ever say.
"""

import itertools
import json
import sys
from pathlib import Path

GREETINGS = ("", "Hello. ", "Good morning. ", "Quick question. ", "Excuse me. ", "Hi there. ")
ENDINGS = ("", " Thanks.", " Please be brief.")
ANSWERS = {
    "I am Skipper, the assistant of the robotics lab.": ("Who are you?", "What is your name?"),
    "The tower: it has the fastest GPU.": ("Which machine is the fastest?", "Where do I train large models?"),
    "In room 12, next to the kitchen.": ("Where is the printer?", "Where can I print?"),
    "Every night at four.": ("When is the backup?", "When are files saved?"),
    "Write to Ada: she opens accounts.": ("How do I get an account?", "Who gives me access?"),
    "Two days, then they are removed.": ("How long are logs kept?", "When do logs go away?"),
}
CHATS = 200
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chats():
    """The chats, the same ones each time: every question with greetings and endings."""
    asked = itertools.product(GREETINGS, ENDINGS, ANSWERS.items(), range(2))
    for greeting, ending, (answer, questions), which in itertools.islice(asked, CHATS):
        question = f"{greeting}{questions[which]}{ending}"
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def make_tokenizer():
    """A byte-level BPE tokenizer with Qwen's marks and chat template, trained on the chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((message["content"] for chat in chats() for message in chat), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


def main(folder: Path):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.2,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder / "models" / "qwen")
    tokenizer.save_pretrained(folder / "models" / "qwen")
    lines = (json.dumps({"messages": chat}) + "\n" for chat in chats())
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
