"""The files beside docs/deployment.md: a unit that systemd takes, a Dockerfile whose paths and
command exist, and a page whose blocks load and parse."""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from decodegrid.configs.load import CONFIGS_DIR, load_config
from decodegrid.configs.server_section import ServerSection
from decodegrid.engine.cli import build_parser
from decodegrid.engine.server_process import _CLOSE_S, _LAST_ANSWERS_S

ROOT = CONFIGS_DIR.parent
FOLDER = ROOT / "docs" / "deployment"
UNIT, DOCKERFILE = FOLDER / "decodegrid.service", FOLDER / "Dockerfile"
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
BIN = "/opt/decodegrid/bin/decodegrid"
KNOWN_KEYS = """
Description Wants After StartLimitIntervalSec StartLimitBurst Type User Group EnvironmentFile
Environment CacheDirectory WorkingDirectory ExecStartPre ExecStart KillSignal KillMode
TimeoutStopSec Restart RestartSec RestartPreventExitStatus LimitNOFILE NoNewPrivileges
CapabilityBoundingSet AmbientCapabilities ProtectSystem ProtectHome PrivateTmp PrivateDevices
ProtectClock ProtectControlGroups ProtectHostname ProtectKernelLogs ProtectKernelModules
ProtectKernelTunables ProtectProc RestrictAddressFamilies RestrictNamespaces RestrictRealtime
RestrictSUIDSGID LockPersonality RemoveIPC SystemCallArchitectures SystemCallFilter
SystemCallErrorNumber UMask WantedBy
"""
"""Of systemd.unit(5), systemd.service(5), systemd.exec(5) and systemd.kill(5)."""
Settings = dict[str, dict[str, list[str]]]


def unit_settings() -> Settings:
    """Section -> key -> values. A key may stand several times, which configparser has no place
    for."""
    found: Settings = {}
    section = ""
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            continue
        key, equals, value = line.partition("=")
        assert equals and section, line
        found.setdefault(section, {}).setdefault(key, []).append(value)
    return found


def environment_file() -> dict[str, str]:
    lines = (FOLDER / "decodegrid.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def parse_command(command: str, variables: dict[str, str]) -> object:
    """The command line as the program's own parser takes it; raises for one that it refuses."""
    for name, value in variables.items():
        command = command.replace(f"${{{name}}}", value)
    words = shlex.split(command)
    assert "$" not in command and words.pop(0) in (BIN, "decodegrid")
    return build_parser().parse_args(words)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_the_unit() -> None:
    unit = unit_settings()
    assert set(unit) == {"Unit", "Service", "Install"}
    service = {key: values[-1] for key, values in unit["Service"].items()}
    assert service["Type"] in ("exec", "notify")
    assert service["User"] == service["Group"] == "decodegrid"
    assert service["KillSignal"] == "SIGTERM"
    assert service["EnvironmentFile"] == "/etc/decodegrid/decodegrid.env"
    variables = environment_file()
    check = parse_command(service["ExecStartPre"], variables)
    serve = parse_command(service["ExecStart"], variables)
    assert (vars(check)["action"], vars(serve)["command"]) == ("check", "serve")
    for args in (check, serve):
        assert str(vars(args)["config"]) == variables["DEPLOYMENT"]
        assert vars(args)["overrides"] == [f"server.api_keys_file={variables['API_KEYS_FILE']}"]
    hardening = {
        "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes",
        "PrivateTmp": "yes", "CapabilityBoundingSet": "", "RestrictSUIDSGID": "yes",
        "SystemCallFilter": "@system-service", "UMask": "0077",
    }  # fmt: skip
    assert {key: service[key] for key in hardening} == hardening
    # What is written is written where systemd lets it.
    assert (
        f"DECODEGRID_CACHE_DIR=/var/cache/{service['CacheDirectory']}"
        in (unit["Service"]["Environment"])
    )


@pytest.mark.parametrize("name", ["tiny.yaml", "h200.yaml", "v41-flash-8gpu.yaml"])
def test_systemd_waits_longer_than_a_drain(name: str) -> None:
    stop = seconds(unit_settings()["Service"]["TimeoutStopSec"][-1])
    drain = load_config(CONFIGS_DIR / name).config.server.drain_timeout_s
    end = _LAST_ANSWERS_S + _CLOSE_S
    assert drain >= ServerSection().drain_timeout_s and stop > drain + end
    assert "by the 12\n  seconds" in PAGE and end == 12


def test_no_secret_in_the_files() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?i)(password|secret|token|bearer)\s*=", text), path
        assert not re.search(r"\b[A-Za-z0-9_-]{32,}\b", text), path
    assert all(value.startswith("/") for value in environment_file().values())


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """systemd-analyze where it exists; the keys against its manual's lists everywhere."""
    known = set(KNOWN_KEYS.split())
    given = {key for section in unit_settings().values() for key in section}
    assert given <= known, given - known
    program = shutil.which("systemd-analyze")
    if program is None:
        return
    # It looks for the program that is started, which is not installed here.
    stand_in = tmp_path / "decodegrid"
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)

    def verify(text: str) -> str:
        unit = tmp_path / UNIT.name
        unit.write_text(text.replace(BIN, str(stand_in)))
        done = subprocess.run(
            [program, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
        )
        # Of other units of this machine it may say something too.
        return "\n".join(line for line in done.stderr.splitlines() if UNIT.name in line)

    text = UNIT.read_text(encoding="utf-8")
    assert verify(text) == ""
    assert "'KilSignal'" in verify(text.replace("KillSignal", "KilSignal"))


def instructions() -> Iterator[tuple[str, str]]:
    """(name, arguments) of each instruction, with continued lines joined and comments left out."""
    lines = DOCKERFILE.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        yield name, " ".join(rest.split())


def exec_form(arguments: str) -> list[str]:
    assert arguments.startswith("["), arguments
    return [str(word) for word in eval(arguments)]


def test_what_the_dockerfile_copies_exists() -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = set()
    for name, rest in instructions():
        if name == "COPY" and "--from" not in rest:
            copied |= set(rest.split()[:-1])
    assert copied and all((ROOT / source).exists() for source in copied)
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {folder for folder in packages["package-dir"].values()}
    assert {folder.partition("/")[0] for folder in folders} <= copied
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "NOTICE"} <= copied


def test_the_command_of_the_image() -> None:
    steps = list(instructions())
    last = {name: rest for name, rest in steps}
    command = shlex.join(exec_form(last["ENTRYPOINT"]) + exec_form(last["CMD"]))
    args = vars(parse_command(command, {}))
    assert (args["command"], args["host"]) == ("serve", "0.0.0.0")
    assert str(args["port"]) == last["EXPOSE"] == str(ServerSection().port)
    assert last["STOPSIGNAL"] == "SIGTERM"
    user = last["USER"].split(":")[0]
    assert user.isdigit() and int(user) > 0
    assert f"--uid {user}" in " ".join(rest for name, rest in steps if name == "RUN")
    # Nothing but the user's own steps after the change of user.
    names = [name for name, _ in steps]
    assert "RUN" not in names[names.index("USER") :]
    assert f"http://127.0.0.1:{last['EXPOSE']}/ready" in last["HEALTHCHECK"]
    source = (ROOT / "engine" / "server_app.py").read_text(encoding="utf-8")
    assert '@app.get("/ready")' in source


def test_the_health_check_is_python(tmp_path: Path) -> None:
    rest = {name: rest for name, rest in instructions()}["HEALTHCHECK"]
    words = exec_form(rest.partition("CMD ")[2])
    assert words[:2] == ["python", "-c"]
    compile(words[2], "HEALTHCHECK", "exec")


def test_torch_comes_from_its_own_index_and_secrets_from_nowhere() -> None:
    steps = list(instructions())
    arguments = dict(rest.split("=", 1) for name, rest in steps if name == "ARG" and "=" in rest)
    assert arguments["TORCH_INDEX"] == ""
    installs = [rest for name, rest in steps if name == "RUN" and "pip install" in rest]
    assert all("-c constraints.txt" in rest for rest in installs)
    (index,) = [rest for rest in installs if "--index-url" in rest]
    command = index.partition("&&")[0].replace("/opt/decodegrid/bin/pip", "echo")
    common = "install --no-cache-dir -c constraints.txt"
    for given, wanted in (
        ("", f"{common} torch"),
        ("an index", f"{common} --no-deps --index-url an index torch"),
    ):
        found = subprocess.run(
            ["sh", "-c", command], env={"TORCH_INDEX": given}, capture_output=True, text=True
        )
        assert found.stdout.strip() == wanted
    names = " ".join(rest for name, rest in steps if name in ("ARG", "ENV"))
    assert not re.search(r"(?i)key|token|secret|password", names)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_of_the_page_loads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(text, encoding="utf-8")
    assert any(place != "default" for place in load_config(path).origins.values())


def commands() -> Iterator[str]:
    """The lines of the page's shell blocks, continued ones joined, without comments."""
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line and not line.startswith("#"):
                yield " ".join(line.split())


@pytest.mark.parametrize("line", list(commands()))
def test_commands_of_the_page_parse(line: str) -> None:
    args = vars(parse_command(line, {}))
    named = args.get("config")
    assert named is None or (ROOT / named).is_file()


def test_the_page_names_every_section_and_file() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    sections = {key.split(".")[0] for key in load_config(None).origins} - {"schema_version"}
    assert rows == sections
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
    installed = re.findall(r"(?:^|\s)(docs/\S+)", "\n".join(blocks("console")))
    assert len(installed) >= 3 and all((ROOT / path).is_file() for path in installed)
