"""scripts/ddp.py with shares: our sampler deals the batch, and weigh() weights the gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from skyctl.torch import sampler, share, step, weigh


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    images = torch.randn(480, 3, 16, 16)
    labels = (images.mean(dim=(1, 2, 3)) > 0).long()
    dataset = TensorDataset(images, labels)
    dealt = sampler(dataset, 24)
    loader = DataLoader(dataset, batch_sampler=dealt)

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 2),
    )
    model = weigh(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(3):
        dealt.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step()
            total += loss.detach() * len(x)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() / len(dataset):.6f} (rank 0 has {share(24)} of 24)")
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "ddp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
