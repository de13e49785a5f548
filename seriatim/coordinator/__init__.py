"""The coordinator: decides a queue's order, and holds nothing.

Clients ask it where to send and where to read, operators tell it what to change, members report to it. All it decides
stands in the chain document of the queue, in ZooKeeper, changed by compare-and-set only; so any number of coordinators may
run, any serves any request, and one that dies in the middle leaves something that the next call goes on from. The
one that is elected also does what nobody asked for: it finishes closings, re-admits groups, tells ends and lets go.

`core` decides, without I/O. `store` is ZooKeeper, `members` the brokers, whom many queues ask in `turns`, `execution` carries out what a
procedure of the core orders, `service` answers calls and tells clients of changes; what operators ask for is in `administration`, `recovery`
and `abandoning`. `background` is the loop of the elected one, `process` starts and stops it all.
"""
