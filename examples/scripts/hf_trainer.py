"""Hugging Face's Trainer on a causal language model made from a config: `torchrun hf_trainer.py`."""

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main():
    set_seed(0)
    start = torch.randint(0, 60, (480, 1))
    tokens = (start + torch.arange(24)) % 64
    dataset = Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir="hf_trainer",
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
