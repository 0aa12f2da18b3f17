"""The mesh that a spec declares: its axes, their sizes, the device and the links."""

from __future__ import annotations

from collections.abc import Mapping

from placement.lang.diagnostics import Diagnostics, did_you_mean
from placement.lang.spec import Device as DeviceLine
from placement.lang.spec import MeshAxis, Spec
from placement.solver.cost import DEVICES, LINKS, Device, Link, defaults, known_link
from placement.solver.mesh import Axis, Mesh


def mesh_of(spec: Spec, axes: Mapping[str, int], device_type: str, found: Diagnostics) -> Mesh:
    """The mesh of ``spec`` where ``axes`` (ranks by axis name) says the sizes that it leaves open.

    ``device_type`` (``cpu``, ``cuda``) is the device where the spec names none. Raises PlacementError where the axes,
    the device or a link make no mesh, with what ``found`` has already.
    """
    if not spec.axes:
        found.error("PLC111", "the spec declares no mesh axis", hint="begin with a line like: mesh tp = 2")
        found.raise_if_any(spec.sources)
    names = [str(declared.name) for declared in spec.axes]
    for given in axes:
        if given not in names:
            text = f"the mesh has an axis '{given}' that the spec does not declare"
            known = ", ".join(f"'{name}'" for name in names)
            told = f"the axes of the spec are {known}" if len(names) > 1 else f"the axis of the spec is {known}"
            found.error("PLC101", text, spec.axes[0].name.span, hint=did_you_mean(given, names) or told)
    found.raise_if_any(spec.sources)
    device, link = _device(spec, device_type, found)
    order = {name: index for index, name in enumerate(axes)}  # that of the mesh: it says where blocks lie
    lines = sorted(spec.axes, key=lambda declared: order.get(str(declared.name), len(order)))
    made = [(_axis(declared, axes, found), _link(declared, spec, device, link, found)) for declared in lines]
    found.raise_if_any(spec.sources)
    return Mesh(tuple(axis for axis, _ in made), device, tuple(link for _, link in made))


def _device(spec: Spec, device_type: str, found: Diagnostics) -> tuple[Device, Link]:
    """The device, and the link of axes that name none."""
    device, link = defaults(device_type)
    if spec.device is None:
        return device, link
    if spec.device.figures:
        device = _own(spec.device)
        return device, known_link("nvlink", device)
    if str(spec.device.name) not in DEVICES:
        hint = did_you_mean(str(spec.device.name), DEVICES) or (
            f"known devices: {', '.join(DEVICES)}; or give its figures, as in: "
            f"device {spec.device.name} = 60 TFLOP/s float32, 2 TB/s, 96 GB"
        )
        found.error("PLC109", f"unknown device '{spec.device.name}'", spec.device.name.span, hint=hint)
        return device, link
    device = DEVICES[str(spec.device.name)]
    return device, link if device.name == "cpu" else known_link("nvlink", device)


def _own(line: DeviceLine) -> Device:
    """The device that a line declares, which `placement.lang.check` has found whole."""
    amounts = {figure.what: max(1, int(figure.quantity.amount)) for figure in line.figures}
    return Device(
        name=str(line.name),
        flops={str(figure.dtype): amounts[figure.what] for figure in line.figures if figure.dtype is not None},
        bandwidth=amounts["bandwidth"],
        capacity=amounts["capacity"],
        sources=f"{line.span.file}:{line.span.line}",
    )


def _axis(declared: MeshAxis, axes: Mapping[str, int], found: Diagnostics) -> Axis:
    name = str(declared.name)
    size = axes.get(name, declared.size)
    if size is None:
        hint = f"write it here, as in: mesh {name} = 2; or give a mesh: --mesh {name}=2"
        found.error("PLC102", f"the size of axis '{name}' is not known", declared.span, hint=hint)
    elif declared.size is not None and size != declared.size:
        text = f"axis '{name}' is {declared.size} in the spec and {size} in the mesh"
        hint = f"leave the size out, then the mesh decides: mesh {name}"
        found.error("PLC102", text, declared.size_span or declared.span, hint=hint)
    return Axis(name, size or 1)


def _link(declared: MeshAxis, spec: Spec, device: Device, default: Link, found: Diagnostics) -> Link:
    own = {str(line.name): line for line in spec.links}
    if declared.link is None:
        return default
    if declared.link in own:
        line = own[declared.link]
        return Link(str(line.name), max(1, int(line.bandwidth.amount)), line.latency.amount)
    if str(declared.link) in LINKS:
        return known_link(str(declared.link), device)
    hint = did_you_mean(str(declared.link), [*LINKS, *own]) or f"known links: {', '.join([*LINKS, *own])}"
    found.error("PLC110", f"unknown link '{declared.link}'", declared.link.span, hint=hint)
    return default
