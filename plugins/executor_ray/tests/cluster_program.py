"""A Ray cluster of some nodes on this host, for as long as standard input is open: Ray's own kind for tests.

``python cluster_program.py FOLDER 4 2 2``: three nodes of so many CPUs. Prints the address, then obeys ``kill N`` and
``add CPUS`` or ``add CPUS PATH``, where PATH is one more place that this node finds modules in, and prints a line when
that is done.
"""

from __future__ import annotations

import os
import sys


def main(folder: str, cpus: list[int]) -> None:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.mkdir(f"{folder}/ray")
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": 80 << 20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": cpus[0], "include_dashboard": False, "no_monitor": True, **common},
    )
    nodes = [cluster.head_node, *(cluster.add_node(num_cpus=count, **common) for count in cpus[1:])]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, number, *path = line.split()
        if word == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            if path:
                os.environ["PYTHONPATH"] = f"{path[0]}{os.pathsep}{os.environ['PYTHONPATH']}"
            nodes.append(cluster.add_node(num_cpus=int(number), **common))
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(one) for one in sys.argv[2:]])
