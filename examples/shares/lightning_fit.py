"""scripts/lightning_fit.py with shares: our sampler, and weigh() for Lightning's DDP module."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skyctl.torch import sampler, weigh


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def on_train_start(self):
        weigh(self.trainer.strategy.model)

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.batch_sampler.set_epoch(self.current_epoch)

    def training_step(self, batch, batch_index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=len(x))
        return loss

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['loss'].item():.6f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(0)
    inputs = torch.randn(480, 20)
    labels = (inputs.sum(dim=1) > 0).long()
    dataset = TensorDataset(inputs, labels)
    loader = DataLoader(dataset, batch_sampler=sampler(dataset, 24))
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), loader)
    trainer.save_checkpoint("lightning_fit.ckpt")


if __name__ == "__main__":
    main()
