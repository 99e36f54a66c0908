"""scripts/trl_sft.py with shares: SFTTrainer weights its loss by tokens itself, so there is no weigh()."""

import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from skyctl.torch import sampler, share


class SharesTrainer(SFTTrainer):
    def get_train_dataloader(self):
        dealt = sampler(self.train_dataset, 24, seed=self.args.seed)
        loader = DataLoader(self.train_dataset, batch_sampler=dealt, collate_fn=self.data_collator)
        loader.set_epoch = dealt.set_epoch
        return loader


def make_tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *(str(number) for number in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_text():
    start = random.randrange(40)
    return " ".join(str((start + i) % 60) for i in range(random.randrange(6, 20)))


def main():
    set_seed(0)
    dataset = Dataset.from_dict({"text": [make_text() for _ in range(480)]})
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=1)
    )
    arguments = SFTConfig(
        output_dir="trl_sft",
        per_device_train_batch_size=share(24),
        num_train_epochs=2,
        learning_rate=1e-2,
        max_length=32,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
    )
    trainer = SharesTrainer(
        model=model, args=arguments, train_dataset=dataset, processing_class=make_tokenizer()
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
