"""``skyctl clean``'s part on a node, over a real sshd."""

from __future__ import annotations

from skyctl.remote.bootstrap import clean_node_cache
from skyctl.remote.session_factory import connect_node, open_session

from .conftest import Sshd


def test_a_node_is_cleaned_without_an_agent(sshd: Sshd) -> None:
    options, node = sshd.options(), sshd.node()
    cache = sshd.home / ".cache" / "skyctl"
    with open_session(node, options) as session:
        session.push_tree({"train.py": b"pass\n"})
    for dry_run in (True, False):
        assert cache.exists()
        connection = connect_node(node, options)
        try:
            kinds = {kind.what: kind for kind in clean_node_cache(connection, options, dry_run=dry_run)}
        finally:
            connection.close()
        assert kinds["packages"].removed == kinds["trees"].removed == 1
    assert not cache.exists()
