"""Cluster specification: what it takes, and what it says of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex_contracts.errors import InvalidArgument
from loraplex_fleet.spec import ClusterSpec, CountSpec, ResourceSpec, ScaleSpec, from_plain, load_spec, parse_spec

FULL = """\
model: /models/base
name: chat
address: 10.0.0.1:6379
adapters: /adapters
worker:
  count: {min: 2, max: 8}
  resources: {gpu: 1, cpu: 4, a100: 0.5}
  flags:
    adapter-slots: 64
    kv-memory: 4GiB
    prefix-caching: false
    draft-model: [small=/models/small]
  store: /var/lib/loraplex/store
  scale: {target-pending-tokens: 5000, up-after: 5s, down-after: 2m}
router: {count: 2, port: 50051, host: 0.0.0.0, flags: {http-port: 8000}}
drain: 1m
secrets: {auth-file: /etc/auth.json, worker-token-file: /etc/token}
tls: {cert: /etc/cert.pem, key: /etc/key.pem, ca: /etc/ca.pem}
"""


def test_everything_that_it_takes(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FULL)
    spec = load_spec(tmp_path / "cluster.yaml")
    assert (spec.model, spec.name, spec.address, spec.adapters) == (
        "/models/base",
        "chat",
        "10.0.0.1:6379",
        "/adapters",
    )
    assert spec.worker.count == CountSpec(2, 8)
    assert spec.worker.resources == ResourceSpec(4, 1, {"a100": 0.5})
    assert spec.worker.scale == ScaleSpec(5000, 5.0, 120.0)
    assert spec.worker.flags == (
        "--adapter-slots", "64", "--kv-memory", "4GiB", "--no-prefix-caching", "--draft-model", "small=/models/small",
    )  # fmt: skip
    assert spec.router.flags == ("--http-port", "8000")
    assert spec.drain_s == 60.0
    assert from_plain(json.loads(json.dumps(spec.plain()))) == spec


def test_little_is_enough() -> None:
    for host in ("0.0.0.0", "::", "[::1]", "node-1.local"):
        assert parse_spec({"model": "m", "router": {"host": host}}).router.host == host
    assert parse_spec({"model": "m"}) == ClusterSpec("m")
    assert parse_spec({"model": "m", "worker": {"count": 3}}).worker.count == CountSpec(3, 3)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "model must be given"),
        ([], "the file must be a mapping"),
        ({"model": "m", "modle": "x"}, r"modle is unknown \(did you mean model\?\)"),
        ({"model": 3}, "model must be a text"),
        ({"model": "m", "name": "A b"}, "name must be small letters"),
        ({"model": "m", "address": "somewhere"}, "address must be auto or Ray's HOST:PORT"),
        ({"model": "m", "adapters": "here"}, "adapters must be an absolute path"),
        ({"model": "m", "worker": 3}, "worker must be a mapping"),
        ({"model": "m", "worker": {"replicas": 3}}, "worker.replicas is unknown"),
        ({"model": "m", "worker": {"count": 0}}, "worker.count must be a whole number from 1"),
        ({"model": "m", "worker": {"count": {"min": 2, "max": 1}}}, "worker.count.max must be at least min, 2"),
        ({"model": "m", "worker": {"resources": {"gpu": -1}}}, "worker.resources.gpu must be a number"),
        (
            {"model": "m", "worker": {"resources": {"gpu": 1.5}}},
            "worker.resources.gpu must be a part of one",
        ),
        ({"model": "m", "worker": {"resources": {"CPU": 2}}}, "worker.resources.CPU is a name of Ray's own"),
        ({"model": "m", "router": {"resources": {"memory": 1}}}, "router.resources.memory is a name of Ray's own"),
        ({"model": "m", "router": {"host": "no host"}}, "router.host must be a host name or an address"),
        ({"model": "m", "worker": {"flags": {"slots": 1}}}, "worker.flags.slots is not a flag of the command"),
        ({"model": "m", "worker": {"flags": {"adapter-slots": "x"}}}, "worker.flags.adapter-slots must be a whole"),
        ({"model": "m", "worker": {"flags": {"adapter-slots": True}}}, "worker.flags.adapter-slots must be a whole"),
        ({"model": "m", "worker": {"flags": {"adapter-slots": 0}}}, "^worker.flags.adapter-slots must be at least 1"),
        ({"model": "m", "worker": {"flags": {"kv-memory": "lots"}}}, "^worker.flags.kv-memory 'lots' is not a size"),
        ({"model": "m", "worker": {"flags": {"host": "x"}}}, "worker.flags.host is given by router.host"),
        ({"model": "m", "worker": {"flags": {"adapters": "/x"}}}, "worker.flags.adapters is given by adapters"),
        (
            {"model": "m", "worker": {"flags": {"tls-client-ca": "/x"}}},
            "^worker.flags.tls-client-ca is not for a fleet's",
        ),
        (
            {"model": "m", "router": {"flags": {"worker-client-cert": "/x"}}},
            "^router.flags.worker-client-cert is of no",
        ),
        ({"model": "m", "router": {"flags": {"worker-client-key": "/x"}}}, "^router.flags.worker-client-key is of no"),
        ({"model": "m", "worker": {"scale": {"up-after": "soon"}}}, "worker.scale.up-after must be a time"),
        ({"model": "m", "router": {"flags": {"worker": "h:1"}}}, "router.flags.worker is given by worker.count"),
        ({"model": "m", "router": {"flags": {"homes": 0}}}, "^router.flags.homes must be at least 1"),
        (
            {"model": "m", "worker": {"resources": {"cpu": 1e-5}}},
            "resources.cpu must have 4 decimals at most, not 1e-05",
        ),
        ({"model": "m", "router": {"resources": {"a": 0.33333}}}, "router.resources.a must have 4 decimals at most"),
        ({"model": "m", "worker": {"resources": {"": 2}}}, "worker.resources.'' is no name"),
        ({"model": "m", "drain": 10**27}, "drain must be a time such as 30s or 5m, a day at most"),
        ({"model": "m", "drain": "25h"}, "drain must be a time"),
        ({"model": "m", "drain": "9" * 400}, "drain must be a time"),
        ({"model": "m", "drain": 10**400}, "drain must be a time"),
        ({"model": "m", "insecure": "yes"}, "insecure must be true or false"),
        ({"model": "m", "tls": {"cert": "/c"}}, "tls takes cert, key and ca together"),
        ({"model": "m", "secrets": {"auth-file": "/a"}}, "secrets.auth-file needs secrets.worker-token-file"),
        ({"model": "m", "secrets": {"worker-token": "abc"}}, "secrets.worker-token is unknown"),
    ],
)
def test_the_rest_is_refused_with_its_key(given: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence) as refused:
        parse_spec(given)
    assert refused.value.field


@pytest.mark.parametrize("text", ["model: [", "\x00", "model: m\n\tx: y"])
def test_what_is_no_yaml(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match="is not YAML"):
        load_spec(tmp_path / "cluster.yaml")
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        load_spec(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: a\nmodel: b", "model is given twice, the second time in line 2"),
        ("model: m\nworker:\n  flags: {seed: 1}\n  flags: {}", r"worker.flags is given twice, .* in line 4"),
        ("model: m\nworker: {flags: {seed: 1, seed: 2}}", "worker.flags.seed is given twice"),
        ("model: &a {b: *a}", "is nested too deeply"),
        ("model: " + "[" * 5000, "is nested too deeply"),
        ("", "model must be given"),
        ("model: 2026-13-45", "a value that is not what it looks like .*month"),
        ("model: m\ndrain: 2024-02-30", "not what it looks like .*day"),
        ("model: !!int abc", "not what it looks like"),
        ("model: !!int ''", "not what it looks like"),
        ("model: !!bool abc", "not what it looks like"),
        ("model: !!timestamp abc", "not what it looks like"),
        ("a: 1\n---\nb: 2", "is not YAML"),
    ],
)
def test_yaml_that_says_less_than_it_seems(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match=sentence):
        load_spec(tmp_path / "cluster.yaml")


def test_long_values_are_cut_in_sentences(tmp_path: Path) -> None:
    text = "model: [" + "\u00e9" * 5000 + ", x" * 5000 + "]"
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidArgument, match="model must be a text") as refused:
        load_spec(tmp_path / "cluster.yaml")
    assert len(refused.value.message) < 2000
    assert refused.value.message.isascii()


def test_beyond_loopback_it_takes_a_token_and_tls() -> None:
    def spec(**more: Any) -> ClusterSpec:
        return parse_spec({"model": "m", **more})

    token = {"secrets": {"worker-token-file": "/t"}}
    tls = {"tls": {"cert": "/c", "key": "/k", "ca": "/a"}}
    spec().check_reach(["127.0.0.2", "::1"])
    for given, sentence in (({}, "secrets.worker-token-file is needed"), (token, "tls is needed")):
        with pytest.raises(InvalidArgument, match=sentence):
            spec(**given).check_reach(["127.0.0.1", "10.0.0.7"])
    with pytest.raises(InvalidArgument, match="worker-token-file"):
        spec(insecure=True).check_reach(["10.0.0.7"])
    spec(**token, **tls).check_reach(["10.0.0.7"])
    spec(**token, insecure=True).check_reach(["10.0.0.7"])


@pytest.mark.parametrize(
    "given",
    [
        {"model": "m"},
        {"model": "m", "drain": 0, "router": {"port": 0}, "worker": {"resources": {"cpu": 0}}},
        {"model": "m", "worker": {"count": {"min": 1, "max": 3}, "flags": {"speculate": 2}}, "insecure": True},
    ],
)
def test_it_crosses_as_json_without_what_is_usual(given: dict[str, Any]) -> None:
    spec = parse_spec(given)
    plain = json.loads(json.dumps(spec.plain()))
    assert from_plain(plain) == spec
    assert {key.removesuffix("_s") for key in plain} == set(given)


@pytest.mark.parametrize(
    ("more", "key"), [({"shards": 2}, "shards"), ({"worker": {"resources": {"tpu": 1}}}, "worker.resources.tpu")]
)
def test_a_specification_of_another_release_is_refused_by_key(more: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{key} is unknown .* the same version"):
        from_plain({"model": "m", **more})
