"""Every collective and every reduction, and the same in a group of some ranks; prints what came of each.

``DEVICE`` says where the tensors are.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

torch.set_default_device(os.environ.get("DEVICE", "cpu"))
dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
results = {}


def numbers(count, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(rank)
    drawn = torch.randint(-50, 50, (count,), generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def play(group, name):
    members = dist.get_process_group_ranks(group)
    here, count = group.rank(), group.size()
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        for dtype in (torch.float32, torch.int64):
            values = numbers(7, dtype)
            dist.all_reduce(values, getattr(dist.ReduceOp, op), group=group)
            results[f"{name} all_reduce {op} {dtype}"] = values.tolist()
    for op in ("BAND", "BOR", "BXOR"):
        values = numbers(5, torch.int32)
        dist.all_reduce(values, getattr(dist.ReduceOp, op), group=group)
        results[f"{name} all_reduce {op}"] = values.tolist()
    for shape in ((), (0,), (1,), (2, 3)):
        values = torch.full(shape, float(rank))
        dist.all_reduce(values, group=group)
        results[f"{name} all_reduce of {shape}"] = values.tolist()
    values = numbers(400_001)
    work = dist.all_reduce(values, group=group, async_op=True)
    work.wait()
    results[f"{name} large"] = [values.sum().item(), values[-3:].tolist()]
    turned = numbers(6).view(2, 3).t()
    if sys.argv[1] == "skyctl":  # Gloo refuses it
        dist.all_reduce(turned, group=group)
        results[f"{name} not contiguous"] = turned.tolist()
    else:
        straight = turned.contiguous()
        dist.all_reduce(straight, group=group)
        results[f"{name} not contiguous"] = straight.tolist()
    values = numbers(3)
    dist.broadcast(values, members[-1], group=group)
    results[f"{name} broadcast"] = values.tolist()
    values = numbers(3)
    dist.reduce(values, members[0], group=group)
    results[f"{name} reduce"] = values.tolist() if not here else None
    parts = [torch.empty(3) for _ in members]
    dist.all_gather(parts, numbers(3), group=group)
    results[f"{name} all_gather"] = torch.cat(parts).tolist()
    whole = torch.empty(3 * count)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, numbers(3), group=group)
    results[f"{name} all_gather_into_tensor"] = whole.tolist()
    parts = [torch.empty(3) for _ in members] if not here else None
    dist.gather(numbers(3), parts, members[0], group=group)
    results[f"{name} gather"] = None if parts is None else torch.cat(parts).tolist()
    parts = list(numbers(3 * count).split(3)) if not here else None
    own = torch.empty(3)
    dist.scatter(own, parts, members[0], group=group)
    results[f"{name} scatter"] = own.tolist()
    dist.reduce_scatter(own, list(numbers(3 * count).split(3)), group=group)
    results[f"{name} reduce_scatter"] = own.tolist()
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(own, numbers(3 * count), group=group)
    results[f"{name} reduce_scatter_tensor"] = own.tolist()
    parts = [torch.empty(2) for _ in members]
    dist.all_to_all(parts, list(numbers(2 * count).split(2)), group=group)
    results[f"{name} all_to_all"] = torch.cat(parts).tolist()
    whole = torch.empty(2 * count)
    dist.all_to_all_single(whole, numbers(2 * count), group=group)
    results[f"{name} all_to_all_single"] = whole.tolist()
    objects = [None] * count
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    results[f"{name} all_gather_object"] = objects
    dist.barrier(group=group)


play(dist.group.WORLD, "all")
some = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    play(some, "some")
print(json.dumps(results))
if sys.argv[1] == "skyctl":  # Gloo's own hangs or aborts at times as its group goes (torch 2.13)
    dist.destroy_process_group()
