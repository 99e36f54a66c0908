"""DistributedDataParallel with a DistributedSampler, as PyTorch's tutorial has it: `torchrun ddp.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    images = torch.randn(480, 3, 16, 16)
    labels = (images.mean(dim=(1, 2, 3)) > 0).long()
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 2),
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.6f}")
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "ddp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
