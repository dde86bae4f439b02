"""temporary, rshared writes it"""
import tvm
def tvm_target(text):
    kind, *options = text.split()
    d = {"kind": kind}
    for o in options:
        k, v = o.lstrip("-").split("=", 1)
        d[k] = v.split(",") if k == "mattr" else v
    return tvm.target.Target(d)
