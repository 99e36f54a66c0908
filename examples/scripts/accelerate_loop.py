"""A training loop with accelerate, as its quicktour has it: `torchrun accelerate_loop.py`."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(480, 20)
    targets = inputs @ torch.randn(20, 1) + 0.1 * torch.randn(480, 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        losses = []
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()).mean())
        accelerator.print(f"epoch {epoch} loss {torch.stack(losses).mean().item():.6f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "accelerate_loop.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
