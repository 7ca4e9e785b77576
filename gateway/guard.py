"""Who may ask the admin port, and which files a posted policy may name.

The port has no authentication: whoever reaches it is the operator. But so does the operator's browser, which does for
any site what its pages say. Three rules keep pages out, and nobody else:

- A request must call the port by an address, by a name without a dot (localhost, a container's, a service's) or by the
  name that `listen.admin` has. Else a page of evil.example could have that name resolve to this port ("DNS rebinding"),
  be of the same origin, and read the answers, too. Such a name is a public one, and those have dots.
- What changes anything must not come from a page: `Origin` and `Sec-Fetch-Site` say so, and no page can leave them out.
- Browsers that know neither are few and old, but all ask first whether they may send `content-type: application/yaml`
  elsewhere, and nothing here tells them that they may.

A posted policy is data of somebody who may post, not a file of the machine's. Were it read like one, it could have any
file of the process's sent to any server, as a header, or shown in messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from policies import PolicyError, Problem
from policies.files import Files

YAML = "application/yaml"


def refusal(method: str, headers: Mapping[str, str], own_name: str) -> str:
    """Why a request is not answered, in a line; empty where it is. Headers' names are in lower case."""
    host = headers.get("host", "")
    if host and not _ours(host, own_name):  # who sends none is no browser
        return f"the admin port is not called {host[:60]!r}: ask by its address, or as localhost"
    if method in ("GET", "HEAD"):
        return ""
    if "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "the admin port takes no changes from pages in a browser"
    if headers.get("content-type", "").partition(";")[0].strip().lower() != YAML:
        return f"a change needs the header 'content-type: {YAML}', which no page may send unasked"
    return ""


def _ours(host: str, own_name: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or "."
    except ValueError:
        return False
    try:
        ip_address(name)
    except ValueError:
        return "." not in name or name == own_name.lower()
    return True


class Below(Files):
    """Files below `folder`, as their names are written; none at all where there is no folder.

    Links in the folder are followed: they are the operator's own, and Kubernetes mounts secrets by them.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder

    def text(self, path: str | Path, *, pipe: bool = False) -> str:
        if self._folder is None:
            wrong = "a posted policy names a file, and the gateway serves no policy file that it could be beside"
            raise PolicyError([Problem(str(path), 0, "", wrong)])
        if not Path(path).is_relative_to(self._folder) or ".." in Path(path).relative_to(self._folder).parts:
            wrong = "is not below the folder of the policy that the gateway serves"
            raise PolicyError([Problem(str(path), 0, "", wrong, "a posted policy names files there, without '..'")])
        return super().text(path)
