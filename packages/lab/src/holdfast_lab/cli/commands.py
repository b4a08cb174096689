"""The options of ``demo``, ``simulate``, ``chaos``, ``conform`` and ``bench``."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``holdfast``."""
    for command in (demo, simulate, chaos, conform):
        app.command()(command)
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )(bench)


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Which answers get lost.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Write the verdict as JSON.")] = False,
) -> None:
    """See it work: 40 taps without a network, a third of all answers lost, two kills.

    Starts a server and a device of its own in a temporary directory and removes both. Ends with
    exit code 1 if a tap happened twice, or not at all.

    For example:

        holdfast demo
    """
    from holdfast.cli.signals import run_until_interrupted
    from holdfast_lab.cli.demo import show_demo

    raise typer.Exit(run_until_interrupted(lambda: show_demo(as_json=json, seed=seed)))


def bench(context: typer.Context) -> None:
    """Measure every speed line against its bare alternative and its peers, interleaved.

    Runs in a checkout, with the extra `bench` installed. `holdfast bench --help` lists the parts.

    For example:

        holdfast bench --only jobs walk
    """
    from holdfast_lab.cli.bench import run_bench

    raise typer.Exit(run_bench(context.args))


def chaos(
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="How long to kill and stop processes.")
    ] = 60,
    database: Annotated[str, typer.Option(help="sqlite or postgres.")] = "sqlite",
    nats: Annotated[bool, typer.Option("--nats", help="Bring jobs by NATS.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Which faults there are.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Write the report as JSON.")] = False,
) -> None:
    """Put real processes under fire: kill -9, stops, lost answers, crashes of the database.

    Starts servers, workers, devices and, if asked for, PostgreSQL and NATS of its own, and removes
    all of them. Ends with exit code 1 if an acknowledged action happened twice, or not at all, or
    out of order.

    For example:

        holdfast chaos --seconds 600 --database postgres --nats
    """
    from holdfast.cli.signals import run_until_interrupted
    from holdfast_lab.cli.chaos import show_chaos

    raise typer.Exit(
        run_until_interrupted(
            lambda: show_chaos(
                seconds=seconds, database=database, nats=nats, seed=seed, as_json=json
            )
        )
    )


def simulate(  # noqa: PLR0917 - typer calls by name
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds to run.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="How long to run.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Replay this one, and show all that happened.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="The seed to begin with.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=256, help="Processes; one per core by default.")
    ] = None,
    planted: Annotated[
        bool, typer.Option("--planted", help="Hunt bugs that were planted on purpose.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write the result as JSON.")] = False,
) -> None:
    """Torture the real code in a simulated world: crashes, lost answers, full disks, power cuts.

    Device, server, store and jobs run in one process, in virtual time, and everything that goes
    wrong is decided by the seed. Ends with exit code 1 if a promise was broken; then it says by
    which seed, and by which few faults.

    For example:

        holdfast simulate --seconds 600
    """
    from holdfast.cli.signals import run_until_interrupted
    from holdfast_lab.cli.simulate import check_options, show_planted, show_seed, show_simulation

    check_options(seed=seed, seeds=seeds, seconds=seconds, planted=planted)
    if planted:
        raise typer.Exit(run_until_interrupted(lambda: show_planted(jobs=jobs, as_json=json)))
    if seed is not None:
        raise typer.Exit(run_until_interrupted(lambda: show_seed(seed, as_json=json)))
    raise typer.Exit(
        show_simulation(seeds=seeds, seconds=seconds, first=first, jobs=jobs, as_json=json)
    )


def conform(  # noqa: PLR0917 - typer turns them into options
    url: Annotated[str, typer.Argument(help="Where the server is, such as http://127.0.0.1:8000.")],
    token: Annotated[
        str | None,
        typer.Option(envvar="HOLDFAST_CONFORM_TOKEN", help="Sign in with this token."),
    ] = None,
    other_token: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_CONFORM_OTHER_TOKEN",
            help="A token of another tenant, to see that tenants are apart.",
        ),
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_CONFORM_SECRET",
            help="Make tokens with this HS256 secret, for newcomers.",
        ),
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="Only walk, planning, routes or field.", metavar="NAME")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON that names the guarded operation of a server."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON, for scripts.")] = False,
) -> None:
    """Check over HTTP whether a server keeps the contract.

    It writes to the server: give it one that is meant for that. A server of this machine needs no
    token if the command runs in its directory. Ends with exit code 1 if a check fails.

    For example:

        holdfast conform http://127.0.0.1:8000

        holdfast conform https://staging.example --profile orders.json --token "$TOKEN"
    """
    from holdfast.cli.signals import run_until_interrupted
    from holdfast_lab.cli.conform import run_conform
    from holdfast_lab.conformance import SignIn

    raise typer.Exit(
        run_until_interrupted(
            lambda: run_conform(
                url,
                sign_in=SignIn(token=token, other_token=other_token, secret=secret),
                service=service,
                profile_file=profile,
                as_json=json,
            )
        )
    )
