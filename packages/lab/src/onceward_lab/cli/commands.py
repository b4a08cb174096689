"""The options of ``demo``, ``simulate``, ``chaos``, ``conform``, ``attack`` and ``bench``."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``onceward``."""
    for command in (demo, simulate, chaos, conform, attack):
        app.command()(command)
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )(bench)


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed: chooses which responses are lost.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show exactly-once effects: 40 offline actions, a third of the responses lost, two kills.

    Starts a server and a device in a temporary directory and removes both. Exits with 1 if an
    action took effect twice or not at all.

    Examples:
        onceward demo

    """
    from onceward_lab.cli.demo import show_demo
    from onceward_lab.cli.signals import run_until_interrupted

    raise typer.Exit(run_until_interrupted(lambda: show_demo(as_json=json, seed=seed)))


def bench(context: typer.Context) -> None:
    """Run the benchmarks: ratios against the same code without Onceward and against peers.

    Needs the extra `bench`. `onceward bench --help` lists the options.

    Examples:
        onceward bench --only jobs walk

    """
    from onceward_lab.cli.bench import run_bench

    raise typer.Exit(run_bench(context.args))


def chaos(  # noqa: PLR0917 - typer calls by name
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="How long to inject faults.")
    ] = 60,
    database: Annotated[
        str, typer.Option(help="sqlite, postgres, or postgres-ha: a primary and its standby.")
    ] = "sqlite",
    replication: Annotated[
        str | None,
        typer.Option(help="Of postgres-ha: sync, or async, which must lose acknowledged writes."),
    ] = None,
    nats: Annotated[bool, typer.Option("--nats", help="Deliver jobs through NATS.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed: chooses the faults.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Kill and stop real processes, lose responses, crash the database, and check the result.

    Starts servers, workers and devices, and on request PostgreSQL and NATS, and removes all of
    them. Exits with 1 if an acknowledged action took effect twice, not at all, or out of order.

    Examples:
        onceward chaos --seconds 600 --database postgres --nats
        onceward chaos --seconds 600 --database postgres-ha

    """
    from onceward_lab.cli.chaos import show_chaos
    from onceward_lab.cli.signals import run_until_interrupted

    raise typer.Exit(
        run_until_interrupted(
            lambda: show_chaos(
                seconds=seconds,
                database=database,
                replication=replication,
                nats=nats,
                seed=seed,
                as_json=json,
            )
        )
    )


def simulate(  # noqa: PLR0917 - typer calls by name
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds to run (default 2000).")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Run new seeds for this long.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Replay one seed and print its timeline.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Number of processes (default: one per core)."),
    ] = None,
    planted: Annotated[
        bool, typer.Option("--planted", help="Search for the planted bugs (in a checkout).")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run the real code in a simulation with crashes, lost responses, full disks and power cuts.

    Device, server, store and jobs run in one process and in virtual time; the seed determines all
    faults. Exits with 1 if a guarantee was violated, and prints the seed and the faults needed.

    Examples:
        onceward simulate --seconds 600

    """
    from onceward_lab.cli.signals import run_until_interrupted
    from onceward_lab.cli.simulate import check_options, show_planted, show_seed, show_simulation

    check_options(seed=seed, seeds=seeds, seconds=seconds, planted=planted)
    if planted:
        raise typer.Exit(run_until_interrupted(lambda: show_planted(jobs=jobs, as_json=json)))
    if seed is not None:
        raise typer.Exit(run_until_interrupted(lambda: show_seed(seed, as_json=json)))
    raise typer.Exit(
        show_simulation(seeds=seeds, seconds=seconds, first=first, jobs=jobs, as_json=json)
    )


def conform(  # noqa: PLR0917 - typer turns them into options
    url: Annotated[str, typer.Argument(help="URL of the server, such as http://127.0.0.1:8000.")],
    token: Annotated[
        str | None,
        typer.Option(envvar="ONCEWARD_CONFORM_TOKEN", help="Bearer token."),
    ] = None,
    other_token: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_CONFORM_OTHER_TOKEN",
            help="Bearer token of another tenant, for the checks of tenant isolation.",
        ),
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_CONFORM_SECRET",
            help="HS256 secret to sign tokens of new users with.",
        ),
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="Check only walk, planning, routes or field.", metavar="NAME")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file that describes a guarded operation."),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="Instead of a profile: the path of the guarded operation."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="The method of the operation. Default: POST.")
    ] = None,
    body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="A valid body with {unique} in a text or {unique_number} as a number, or @FILE.",
        ),
    ] = None,
    other_path: Annotated[
        str | None,
        typer.Option(help="The path for the other tenant, if it contains an id. Default: --path."),
    ] = None,
    other_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="A body that is valid for the other tenant, or @FILE. Default: --body.",
        ),
    ] = None,
    code_at: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Where the code is in errors of another format, such as error.code.",
        ),
    ] = None,
    statuses_only: Annotated[
        bool,
        typer.Option("--statuses-only", help="Compare the statuses of errors, not their bodies."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Check over HTTP whether a server implements the protocol.

    The checks write to the server: use a test server. A server on this machine needs no token if
    the command runs in its directory. Exits with 1 if a check fails.

    Examples:
        onceward conform http://127.0.0.1:8000

        onceward conform https://staging.example --profile orders.json --token "$TOKEN"

        onceward conform http://127.0.0.1:8000 --path /payments --token "$ADA" --other-token "$BOB"
        --body '{"account": "ada-1", "note": "{unique}"}'
        --other-body '{"account": "bob-1", "note": "{unique}"}'

    """
    from onceward_lab.cli.conform import Operation, run_conform
    from onceward_lab.cli.signals import run_until_interrupted
    from onceward_lab.conformance import SignIn

    raise typer.Exit(
        run_until_interrupted(
            lambda: run_conform(
                url,
                sign_in=SignIn(token=token, other_token=other_token, secret=secret),
                service=service,
                profile_file=profile,
                operation=Operation(
                    method=method,
                    path=path,
                    body=body,
                    other_path=other_path,
                    other_body=other_body,
                    code_at=code_at,
                    statuses_only=statuses_only,
                ),
                as_json=json,
            )
        )
    )


def attack(  # noqa: PLR0917 - typer turns them into options
    url: Annotated[
        str, typer.Argument(help="URL of your own server, such as http://127.0.0.1:8000.")
    ],
    token: Annotated[
        str | None,
        typer.Option(envvar="ONCEWARD_ATTACK_TOKEN", help="Bearer token."),
    ] = None,
    other_token: Annotated[
        str | None,
        typer.Option(envvar="ONCEWARD_ATTACK_OTHER_TOKEN", help="Bearer token of another tenant."),
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_ATTACK_SECRET",
            help="HS256 secret of the server, for tokens that are valid but for one claim.",
        ),
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(help="With --secret: the issuer of valid tokens.")
    ] = None,
    audience: Annotated[
        str | None, typer.Option(help="With --secret: the audience of valid tokens.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="The path of a guarded operation.")] = None,
    method: Annotated[
        str | None, typer.Option(help="The method of the operation. Default: POST.")
    ] = None,
    body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="A valid body with {unique} in a text or {unique_number} as a number, or @FILE.",
        ),
    ] = None,
    other_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="A body that is valid for the other tenant, or @FILE. Default: --body.",
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_ATTACK_REDIS_URL",
            help="URL of the server's Redis, to write forged values to it.",
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="ONCEWARD_ATTACK_DATABASE_URL",
            help="With --redis: URL of the server's database, to lose a commit in it.",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Run only tokens, headers, bodies, floods, slow or cache.", metavar="NAME"
        ),
    ] = None,
    connections: Annotated[
        int, typer.Option(min=1, max=10_000, help="Connections and requests at once.")
    ] = 200,
    patience: Annotated[
        float,
        typer.Option(
            min=0.1, max=3600, help="Seconds in which the server must close stalled connections."
        ),
    ] = 45.0,
    body_bytes: Annotated[
        int,
        typer.Option(min=1000, max=100_000_000, help="Size of bodies that are expensive to read."),
    ] = 1_000_000,
    health_path: Annotated[
        str, typer.Option(help="A page without sign-in, to measure how others are served.")
    ] = "/healthz",
    health_ms: Annotated[
        float, typer.Option(min=1, help="Its 99th percentile under load, in milliseconds.")
    ] = 250.0,
    yes_i_own_this_server: Annotated[
        bool,
        typer.Option("--yes-i-own-this-server", help="Attack a server on another machine."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Attack your own server and report what held.

    Sends forged tokens, conflicting headers, malicious JSON, floods and stalled connections, and
    writes to the server: use a test server. A server on this machine needs no token if the command
    runs in its directory. Exits with 1 if an attack succeeded.

    Examples:
        onceward attack http://127.0.0.1:8000

        onceward attack http://127.0.0.1:8000 --path /payments --token "$ADA" --other-token "$BOB"
        --body '{"note": "{unique}"}' --redis redis://127.0.0.1:6379/0

    """
    from onceward_lab.attack.target import Limits
    from onceward_lab.cli.attack import AttackOptions, run_attack
    from onceward_lab.cli.signals import run_until_interrupted
    from onceward_lab.conformance import SignIn

    raise typer.Exit(
        run_until_interrupted(
            lambda: run_attack(
                url,
                sign_in=SignIn(
                    token=token,
                    other_token=other_token,
                    secret=secret,
                    issuer=issuer,
                    audience=() if audience is None else (audience,),
                ),
                options=AttackOptions(
                    method=method,
                    path=path,
                    body=body,
                    other_body=other_body,
                    group=group,
                    redis_url=redis,
                    database_url=database,
                    health_path=health_path,
                    limits=Limits(
                        connections=connections,
                        patience_seconds=patience,
                        body_bytes=body_bytes,
                        health_ms=health_ms,
                    ),
                    is_own_server=yes_i_own_this_server,
                ),
                as_json=json,
            )
        )
    )
