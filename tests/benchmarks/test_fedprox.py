"""FedProx's experiment: the vectorised rounds beside a plain loop, and the draws of the workload script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fedprox
import numpy as np
import pytest
import torch
from runs.fedprox_owners import by_owners
from runs.fedprox_peers import FlowerError, by_flower
from runs.fedprox_rounds import METHODS, SCRIPT, Federation, Method, load_script, simulate
from torch.nn.functional import cross_entropy

from skyctl.schedule.rounds import clients_of_round

SMALL = Federation(1.0, 1.0, 4, users=5, clients=3, epochs=3)
ROUNDS = 3


@pytest.fixture(scope="module")
def script():
    return load_script(SCRIPT)


@pytest.fixture(autouse=True)
def one_thread():
    """Steps are small: threads of torch only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps_of(script, owner, number, method, federation=SMALL):
    return script.local_steps(
        owner, number, 1.0, 1.0, federation.draw, federation.users, federation.clients, federation.epochs,
        method.stragglers,
    )  # fmt: skip


def batches_from(script, owner, seed):
    """Whole batches of the epochs from that seed on."""
    while True:
        for inputs, targets in script.data(10, seed, owner, 1.0, 1.0, SMALL.draw, SMALL.users):
            if len(targets) == 10:
                yield inputs, targets
        seed += 1


def plain_loop(script, method: Method) -> torch.nn.Linear:
    """The rounds as one would write them down: client by client, with torch."""
    (model,) = script.model()
    for number in range(ROUNDS):
        start = [p.detach().clone() for p in model.parameters()]
        sums, count = [torch.zeros_like(p) for p in start], 0
        for client in clients_of_round(SMALL.users, SMALL.clients, SMALL.draw, number):
            owner = f"local-{client + 1}"
            epoch = len(script.samples(1.0, 1.0, SMALL.draw, SMALL.users)[client][1]) // 10
            steps = steps_of(script, owner, number, method)
            if method.drop and steps < SMALL.epochs * epoch:
                continue
            with torch.no_grad():
                for p, first in zip(model.parameters(), start, strict=True):
                    p.copy_(first)
            optimizer = script.optimizer(model.parameters())
            batches = batches_from(script, owner, SMALL.draw + number * SMALL.epochs)
            for _ in range(steps):
                inputs, targets = next(batches)
                near = sum(((p - s) ** 2).sum() for p, s in zip(model.parameters(), start, strict=True))
                optimizer.zero_grad()
                (cross_entropy(model(inputs), targets) + method.mu / 2 * near).backward()
                optimizer.step()
            sums = [s + p.detach() * steps * 10 for s, p in zip(sums, model.parameters(), strict=True)]
            count += steps * 10
        with torch.no_grad():
            for p, first, total in zip(model.parameters(), start, sums, strict=True):
                p.copy_(total / count if count else first)
    return model


def test_rounds_are_those_of_a_plain_loop(script):
    found = simulate(SMALL, ROUNDS)
    for column, method in enumerate(METHODS):
        model = plain_loop(script, method)
        weights = torch.from_numpy(found.weights[:, column])
        torch.testing.assert_close(weights[:-1].T, model.weight.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights[-1], model.bias.detach(), rtol=1e-4, atol=1e-5)
        users = script.samples(1.0, 1.0, SMALL.draw, SMALL.users)
        inputs, targets = (torch.cat([user[part] for user in users]) for part in (0, 1))
        tests, classes = (torch.cat([user[part] for user in users]) for part in (2, 3))
        loss = cross_entropy(model(inputs), targets).item()
        assert found.loss[-1, column] == pytest.approx(loss, rel=1e-4)
        right = script.metrics(model(tests), classes)["accuracy"].item()
        assert found.accuracy[-1, column] == pytest.approx(right, abs=1.5 / len(classes))


def test_a_method_alone_is_what_it_is_beside_others():
    together = simulate(SMALL, 2)
    for column, method in enumerate(METHODS):
        alone = simulate(SMALL, 2, [method])
        np.testing.assert_allclose(alone.weights[:, 0], together.weights[:, column], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_stragglers_are_that_share_of_every_round(script, share):
    method = Method("fedprox 1", share, 1.0, False)
    federation = Federation(1.0, 1.0, 0)
    samples = script.samples(1.0, 1.0, 0, 30)
    for number in range(5):
        chosen = clients_of_round(30, 10, 0, number)
        epochs = [
            steps_of(script, f"local-{client + 1}", number, method, federation)
            / (len(samples[client][1]) // 10)
            for client in chosen
        ]
        assert all(1 <= made <= 20 and made == int(made) for made in epochs)
        assert sum(made < 20 for made in epochs) == round(share * 10)


def test_epochs_are_shuffled_by_their_seed(script):
    def epoch(seed):
        return torch.cat([inputs for inputs, _ in script.data(10, seed, "local-4", draw=1)])

    assert torch.equal(epoch(3), epoch(3))
    assert not torch.equal(epoch(3), epoch(4))
    assert torch.equal(epoch(3)[:, 0].sort().values, epoch(4)[:, 0].sort().values)


def test_every_test_sample_is_in_whole_batches_as_often(script):
    wanted = script.samples(1.0, 1.0, 1, 30)[3][3].repeat(10)
    held_out = [targets for _, targets in script.validation(10, 0, "local-4", draw=1)]
    assert {len(targets) for targets in held_out} == {10}
    assert torch.equal(torch.cat(held_out).sort().values, wanted.sort().values)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.0, 0.0)])
def test_samples_are_those_of_the_published_generator(script, alpha, beta):
    """As generate_synthetic() of litian96/FedProx draws them, call by call."""
    np.random.seed(2)
    draw = np.random
    counts = draw.lognormal(4, 2, 30).astype(int) + 50
    mean_w = draw.normal(0, alpha, 30)
    centre = draw.normal(0, beta, 30)
    cov = np.diag([np.power(j + 1, -1.2) for j in range(60)])
    mean_x = [draw.normal(centre[i], 1, 60) for i in range(30)]
    for user, found in enumerate(script.samples(alpha, beta, 2, 30)):
        weights, bias = draw.normal(mean_w[user], 1, (60, 10)), draw.normal(mean_w[user], 1, 10)
        inputs = draw.multivariate_normal(mean_x[user], cov, counts[user])
        targets = [int(np.argmax(np.dot(x, weights) + bias)) for x in inputs]
        np.testing.assert_allclose(torch.cat([found[0], found[2]]), inputs, rtol=1e-5, atol=1e-6)
        assert torch.cat([found[1], found[3]]).tolist() == targets
        assert len(found[1]) == int(0.9 * counts[user])


def test_flower_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(FlowerError, match="no-python"):
        next(by_flower(str(tmp_path / "no-python"), SMALL, 1))
    with pytest.raises(FlowerError, match="flwr"):
        next(by_flower(sys.executable, SMALL, 1))


@pytest.mark.slow
@pytest.mark.parametrize("label", [pytest.param("fedavg 50%", marks=pytest.mark.matrix), "fedprox 1 50%"])
def test_owners_get_what_the_simulation_gets(tmp_path, label):
    method = next(method for method in METHODS if method.label == label)
    found = by_owners(SMALL, method, ROUNDS, tmp_path)
    assert found["weights_differ_by"] < 1e-6
    assert found["test_loss_differs_by"] < 1e-6
    tested = sum(len(labels) for _, _, _, labels in SMALL.samples)
    assert found["accuracy_differs_by"] < 1.5 / tested  # classes not seen yet are equal, but for rounding


@pytest.mark.slow
def test_it_runs():
    done = subprocess.run(
        [sys.executable, str(Path(fedprox.__file__)), "--draw", "1", "--rounds", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    assert [row["set"] for row in rows if "methods" in row] == ["synthetic(1,1)", "synthetic(0,0)"]
    assert all(len(row["methods"]) == len(METHODS) for row in rows if "methods" in row)
