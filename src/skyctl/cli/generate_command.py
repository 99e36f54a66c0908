"""``skyctl generate``: text from a trained model, over the cluster's nodes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.option_values import DTYPES, complete_choices, complete_run, require_choice
from skyctl.cli.options import ClusterOptions, ConnectionOptions
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.cli.options import ClusterTarget
    from skyctl.cli.progress_display import ProgressDisplay
    from skyctl.jobs.node_sessions import NodeSessions
    from skyctl.run.text_generation import TextPipeline
    from skyctl.workload.hf.adapter_folder import AdapterFolder
    from skyctl.workload.hf.hub_model import HubModel
    from skyctl.workload.hf.prompt import PromptTokenizer
    from skyctl.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How text is generated."""

    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="New tokens, at most.")
    ] = 256
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0.0, max=100.0, metavar="T", help="0: always the likeliest token."),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", min=0.0, max=1.0, metavar="P", help="Draw from the likeliest tokens of this share."
        ),
    ] = 1.0
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of the draw.")] = 0
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A message before the prompt.")
    ] = None
    raw: Annotated[
        bool, typer.Option("--raw", help="The prompt as it is, without the model's chat template.")
    ] = False
    dtype: Annotated[
        str,
        typer.Option("--dtype", metavar="NAME", autocompletion=complete_choices(*DTYPES), help="Of weights."),
    ] = "float32"
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Stages talk through TLS.")] = False
    best: Annotated[
        bool,
        typer.Option("--best", help="Of a run: its checkpoint with the lowest validation loss."),
    ] = False


@command
def generate(
    out: Output,
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|DIR",
            help="A run of an hf: workload, hf:DIR, or a folder of peft's adapters.",
            autocompletion=complete_run,
        ),
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the text goes on from.")],
    *,
    nodes: ClusterOptions,
    connection: ConnectionOptions,
    options: GenerationOptions,
) -> None:
    """Generate text with a Hugging Face model that no single machine has to hold.

    Its layers are spread over the cluster's devices, the fastest first, each with as many as its memory
    holds. The text appears as it comes. Of a run the weights are those that it has ended with, or those of
    --best. DIR may hold the adapters of peft alone: the model that they name must be on this machine.
    """
    from skyctl.jobs.node_sessions import connect_nodes, require_all

    require_choice("--dtype", options.dtype, DTYPES)
    target = nodes.load()
    with (
        _model_to_run(out, model, nodes.cluster, connection, best=options.best) as (source, adapters),
        out.progress("generate") as progress,
    ):
        progress("loading the model")
        from skyctl.workload.hf.prompt import PromptTokenizer
        from skyctl.workload.starting_weights import with_adapters
        from skyctl.workload.workload import load_workload
        from skyctl.workload.workload_spec import make_spec

        spec = make_spec(source, batch_size=1, dtype=options.dtype)
        workload = load_workload(spec if adapters is None else with_adapters(spec, adapters))
        out.notes(workload.notes)
        hub = _checked_model(source, workload)
        tokenizer = PromptTokenizer(hub.folder, adapters.tokenizer if adapters is not None else None)
        chat = tokenizer.is_chat and not options.raw
        if options.system is not None and not chat:
            raise InputError("--system needs a model with a chat template, and no --raw")
        ids = tokenizer.encode(prompt, chat=chat, system=options.system)
        limit = _token_limit(hub, len(ids), options.max_tokens)
        connect = connection.connect_options(target.path)
        with connect_nodes(target.cluster.nodes, connect, progress, target.everyone) as sessions:
            require_all(sessions.failures)
            pipeline = _make_pipeline(target, sessions, progress, workload, options, out.note)
            stages = pipeline.stages
            out.detail("; ".join(f"layers {s.start}–{s.stop} on {s.device}" for s in stages))
            try:
                progress("sending the weights")
                pipeline.start()
                progress("reading the prompt")
                answer = _show_answer(out, pipeline.tokens(ids), tokenizer, limit)
            finally:
                pipeline.close()
        rate = answer.tokens_per_s
        said = f"; then {rate:.1f} tokens a second" if rate is not None else ""
        out.note(f"{len(answer.tokens)} tokens; the first after {answer.first_s:.2f} s{said}")
        out.json(
            {
                "workload": source if adapters is None else f"hf:{adapters.folder}",
                "text": tokenizer.decode(answer.tokens),
                "prompt_tokens": len(ids),
                "tokens": answer.tokens,
                "first_token_s": answer.first_s,
                "tokens_per_s": rate,
                "stages": [{"device": s.device, "layers": [s.start, s.stop]} for s in stages],
            }
        )


@dataclass
class Answer:
    """The tokens that came, without the one that ended them. ``first_s``: seconds until the first one."""

    tokens: list[int]
    first_s: float = 0.0
    all_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Of those after the first; None where there is none."""
        after_s = self.all_s - self.first_s
        return (len(self.tokens) - 1) / after_s if len(self.tokens) > 1 and after_s > 0 else None


def _show_answer(out: Output, tokens: Iterator[int], tokenizer: PromptTokenizer, limit: int) -> Answer:
    """Prints the text as it comes, up to its end or so many tokens."""
    from skyctl.workload.hf.prompt import UNFINISHED

    answer, shown = Answer([]), ""
    began, ends = time.monotonic(), tokenizer.end_ids()
    for token in tokens:
        answer.all_s = time.monotonic() - began
        answer.first_s = answer.first_s or answer.all_s
        if token in ends:
            break
        answer.tokens.append(token)
        text = tokenizer.decode(answer.tokens)
        if not out.as_json and not text.endswith(UNFINISHED):
            out.stream(text[len(shown) :])
            shown = text
        if len(answer.tokens) == limit:
            break
    if not out.as_json:
        out.stream(tokenizer.decode(answer.tokens)[len(shown) :] + "\n")
    return answer


def _make_pipeline(
    target: ClusterTarget,
    sessions: NodeSessions,
    progress: ProgressDisplay,
    workload: Workload,
    options: GenerationOptions,
    note: Callable[[str], None],
) -> TextPipeline:
    """The stages on the cluster's devices; what an earlier probe has found of these still counts."""
    from skyctl.jobs.profiles import probe_cluster
    from skyctl.planning.generation_stages import fill_devices
    from skyctl.records.cluster import node_of
    from skyctl.run.text_generation import TextPipeline
    from skyctl.worker.rank_order import Sampling

    asked = (target.cluster, sessions, None, None, progress, progress.node)
    profile, _ = probe_cluster(*asked, link_selection="none", encrypt=options.encrypt)
    assert workload.model.hub is not None
    stages = fill_devices([_layer_bytes(workload, i) for i in range(workload.layers)], profile.devices)
    used = {node_of(stage.device) for stage in stages}
    return TextPipeline(
        cluster=target.cluster,
        sessions={name: session for name, session in sessions.sessions.items() if name in used},
        spec=workload.spec,
        stages=stages,
        threads={device.id: device.threads for device in profile.devices},
        sampling=Sampling(options.temperature, options.top_p, options.seed),
        vocabulary=workload.model.hub.settings.vocabulary,
        encrypt=options.encrypt,
        note=note,
    )


@contextmanager
def _model_to_run(
    out: Output, model: str, cluster: Path | None, connection: ConnectionOptions, *, best: bool
) -> Iterator[tuple[str, AdapterFolder | None]]:
    """The model as an ``hf:`` workload, and a folder of adapters that was named for it, if one was.

    A run is exported for as long as the context lasts.
    """
    from skyctl.workload.hf.adapter_folder import find_adapters

    adapters = find_adapters(model)
    folder_given = (Path(model).expanduser() / "config.json").is_file()
    if best and (adapters is not None or model.startswith("hf:") or folder_given):
        raise InputError(
            f"--best names a checkpoint of a run, and {model} is a folder", hint="leave --best out"
        )
    if adapters is not None:
        out.detail(f"adapters for {adapters.base}")
        yield f"hf:{adapters.base}", adapters
        return
    if model.startswith("hf:") or folder_given:
        yield f"hf:{model.removeprefix('hf:')}", None
        return
    from skyctl.cli.checkpoint_command import export_best
    from skyctl.files import home, make_private
    from skyctl.supervision.run_status import load_run
    from skyctl.supervision.weight_files import export_last_weights

    run = load_run(model)
    run_id, source = run.paths.run_id, run.state.workload
    merge = " --merge" if run.plan.workload is not None and run.plan.workload.lora is not None else ""
    if not source.startswith("hf:"):
        raise InputError(
            f"run {run_id} is of {source}: only hf: workloads generate text",
            hint="a model of your own generates in plain torch: skyctl checkpoint export",
        )
    with tempfile.TemporaryDirectory(prefix="generate-", dir=make_private(home())) as folder:
        target = Path(folder) / "model"
        if best:
            step = export_best(out, run, cluster, connection, target)
            out.detail(f"the weights of run {run_id} after step {step}")
        elif export_last_weights(run, target, merge=True) is None:
            raise InputError(
                f"run {run_id} is {run.state.status}, and has no last weights on this machine",
                hint=f"of its newest checkpoint: skyctl checkpoint export {run_id}{merge} -o DIR, then "
                "skyctl generate hf:DIR",
            )
        else:
            out.detail(f"the weights of run {run_id}")
        yield f"hf:{target}", None


def _checked_model(source: str, workload: Workload) -> HubModel:
    """The model; InputError where it has no weights, or does not predict the next token."""
    hub = workload.model.hub
    assert hub is not None
    if hub.settings.task != "causal":
        raise InputError(f"{source} does not predict next tokens: its task is {hub.settings.task!r}")
    if hub.stored is None:
        raise InputError(
            f"{source} has a config and no weights", hint="download them, or train it: skyctl launch"
        )
    return hub


def _token_limit(hub: HubModel, prompt: int, wanted: int) -> int:
    """How many new tokens there may be after a prompt of so many; InputError where there is room for none."""
    most = hub.settings.positions or prompt + wanted
    if prompt >= most:
        raise InputError(f"the prompt has {prompt} tokens; with what follows the model takes {most}")
    return min(wanted, most - prompt)


def _layer_bytes(workload: Workload, index: int) -> float:
    """Of a layer's parameters and buffers, in the dtypes that it computes in."""
    lowered = workload.model.lowered(index)
    return float(
        sum(t.numel() * (2 if id(t) in lowered else t.element_size()) for t in workload.model.tensors(index))
    )
