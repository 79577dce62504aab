"""How target and drafter talk when they are two deployments.

``transport`` alone decides what travels as an object ref and what by value; ``ledger`` keeps every live
row's features on the target side, so that a drafter's state can always be made again; ``remote`` is the
engine's ``Drafter`` over a Serve handle; ``sessions`` is what it talks to on the drafter's replica.
"""
