"""scripts/accelerate_loop.py with shares: accelerate would shard a prepared loader again."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skyctl.torch import sampler, weigh


def main():
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(480, 20)
    targets = inputs @ torch.randn(20, 1) + 0.1 * torch.randn(480, 1)
    dataset = TensorDataset(inputs, targets)
    dealt = sampler(dataset, 24)
    loader = DataLoader(dataset, batch_sampler=dealt)

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    model = weigh(model)
    for epoch in range(3):
        dealt.set_epoch(epoch)
        total = torch.zeros(1, device=accelerator.device)
        for batch in loader:
            x, y = (tensor.to(accelerator.device) for tensor in batch)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach() * len(x)
        total = accelerator.reduce(total)
        accelerator.print(f"epoch {epoch} loss {total.item() / len(dataset):.6f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "accelerate_loop.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
