"""The process that holds a lab's network: bridges and link ends live in its namespace and die with it.

Started as root by ``lab_setup.up`` with its configuration (JSON) on stdin; answers in one JSON line: the /16
it has claimed and what will carry traffic between sites. Then it switches that traffic, or sleeps. It is in
none of the nodes' cgroups. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from skyctl.lab import delay_switch, system_calls


def main() -> None:
    """Claims a subnet, makes the namespace, answers, and stays."""
    config = json.load(sys.stdin)
    if os.fork():
        return  # what stays is nobody's child, so that nobody has to wait for it
    try:
        subnet, claim = _claim(config["subnets"])
        system_calls.unshare(system_calls.CLONE_NEWNET)
        system_calls.disable_ipv6()
        kind = _kind(config) if config["rates"] or config["lines"] else "none"
        taken = _switch_ports(config, subnet) if kind == "user" else []
    except OSError as exc:
        system_calls.say({"error": str(exc)})
        return
    system_calls.say({"pid": os.getpid(), "subnet": subnet, "switch": kind})
    system_calls.leave_launcher()
    os.chdir("/")
    if not taken:
        while True:
            signal.pause()
    delay_switch.run_switches(taken)
    claim.close()


def _switch_ports(config: dict[str, Any], subnet: int) -> list[delay_switch.SwitchPorts]:
    """The switch between sites, where they are apart, and one for each pair's own line that takes time.

    Their TAPs are opened: ``tapK`` a site, and those that ``lines`` names.
    """
    ports = []
    if rates := config["rates"]:
        sites = {_mac(subnet, site, number): site for site, number in config["nodes"]}
        taps = [delay_switch.open_tap(f"tap{k}") for k in range(len(rates))]
        ports.append(delay_switch.SwitchPorts(taps, sites, rates, [config["latency_s"]] * len(rates)))
    for ends in config["lines"]:
        macs = {bytes.fromhex(end["mac"].replace(":", "")): number for number, end in enumerate(ends)}
        taps = [delay_switch.open_tap(end["interface"]) for end in ends]
        latency_s = [end["latency_s"] for end in ends]
        ports.append(delay_switch.SwitchPorts(taps, macs, [None, None], latency_s))
    return ports


def _mac(subnet: int, site: int, number: int) -> bytes:
    return bytes((0x02, 0x53, 0x4B, subnet, site, number))


def _claim(subnets: list[int]) -> tuple[int, socket.socket]:
    """The first 10.N/16 that no other lab holds: an abstract socket is the lock, gone with this process."""
    for subnet in subnets:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0skyctl-lab-10.{subnet}")
        except OSError:
            claim.close()
            continue
        return subnet, claim
    raise OSError("every 10.N.0.0/16 is in use, by routes of this machine or by other labs")


def _kind(config: dict[str, Any]) -> str:
    """``netem`` where this kernel has it and it may be used, else ``user``."""
    if config["carrier"] != "auto":
        return str(config["carrier"])
    argv = [config["tc"], "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    tried = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if tried.returncode:
        return "user"
    subprocess.run([config["tc"], "qdisc", "del", "dev", "lo", "root"], capture_output=True, check=False)
    return "netem"
