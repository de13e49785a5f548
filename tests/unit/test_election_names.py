"""Names in an election, which become names of ZooKeeper's nodes."""

from __future__ import annotations

import pytest

from seriatim.consumer import Consumer, Subscriber
from seriatim.producer import Producer
from seriatim.protocol.errors import InvalidArgument


@pytest.mark.parametrize("client", [Consumer, Subscriber, Producer])
@pytest.mark.parametrize(
    "name", ["team/app", "two\nlines", "\x7f", "\ud800", "\ufff0", "\U0001f600", "n" * 201, "é" * 101]
)
def test_a_name_that_zookeeper_refuses_is_refused_at_once(client, name):
    with pytest.raises(InvalidArgument, match="name has 1 to 200 bytes"):
        client("127.0.0.1:1", "q", name=name)


@pytest.mark.parametrize("client", [Consumer, Subscriber])
@pytest.mark.parametrize("name", ["", "team app", "équipe-1", "\u65e5\u672c", "n" * 200])
def test_other_names_are_a_reader_s_to_choose(client, name):
    instance = client("127.0.0.1:1", "q", name=name)._settings.instance
    assert instance == name or not name
