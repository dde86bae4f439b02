"""Many boards as one: which host takes which camera, and what happens when a host is lost.

description.py   the fleet: its hosts, models and cameras
fleet_file.py    fleet.toml
messages.py      what hosts and the coordinator tell one another
model_settings.py  the settings of a model, from fleet.toml to the services

The plan:

host_works.py        how fast each host is: the best plan of every model on it
placement.py         the planner: which host takes which camera
placement_search.py  its steps
fleet_arrays.py      a fleet as arrays
placement_bound.py   what no placement can beat
placement_loops.py   moves and swaps of cameras
spare_hosts.py       who starves without which hosts
exact_placement.py   CP-SAT, for small fleets
takeover.py          who takes the cameras that have no host
reassigning.py       its loops
fleet_tables.py      a placement as tables

The coordinator:

coordinator.py    what hosts tell it, what it orders, what it must not forget, and the states of hosts and duties
assignment.py     which host has which camera, under which epochs lines are accepted, and what is counted of a duty
collector.py      the file of all results, each line once
status_tables.py  the states of hosts and duties as tables
fleet_metrics.py  these states as metrics for Prometheus
fleet_site.py     the page of a fleet, its metrics and its health, over HTTP
fleet_page.html   that page

A host:

agent.py            keeps the services of a host as the coordinator orders, and tells what they do
beats.py            the thread in which it speaks with the coordinator, and the lock of its folder
duty_steps.py       the next step of the services towards the duties that are ordered
service_process.py  a service of a host: its process, its settings, its state
service_files.py    the files by which an agent and a service speak with one another
host_results.py     the lines that the services of a host have written, each once to the coordinator
host_processes.py   processes as /proc shows them
host_figures.py     figures of a host for people

On Ray:

ray_door.py     the only door to Ray: which version it is, and what it raises
credentials.py  the key of a fleet: its token, its certificates, its versions
ray_node.py     the processes of Ray on a machine, and their ports
node_keeper.py  keeps them, and an actor, alive
ray_actors.py   the coordinator and the agents as actors
rollout.py      bundles for each host, sent by their sums, and the plan that the coordinator follows
shipping.py     a bundle to a host
kind_bundles.py  model files, compiled for each kind of host
ray_board.py    a host as a board, on which a model is measured
"""
