# ruff: noqa
# mypy: ignore-errors
"""Applies the tables of this folder to the repository: moved modules, whole-word names, and methods by class.

    python tools/rename/rename.py REPOSITORY tools/rename/*.json --step=modules   (then --step=names, --step=scoped)

Keys are the names before; `scoped` finds callers through the errors of mypy. The tables are deleted once applied.
"""

import ast, io, json, os, re, subprocess, sys, collections
from pathlib import Path

repo = Path(sys.argv[1]).resolve()
tables = [a for a in sys.argv[2:] if a.endswith(".json")]
step = next((a.split("=")[1] for a in sys.argv if a.startswith("--step=")), "all")
os.chdir(repo)
modules, names, scoped = {}, {}, []
for t in tables:
    data = json.load(open(t))
    for k, v in data.get("modules", {}).items():
        if k == v:
            continue
        if modules.get(k, v) != v:
            print("CLASH module", k, modules[k], v, t)
        modules[k] = v
    for k, v in data.get("names", {}).items():
        if k == v:
            continue
        if names.get(k, v) != v:
            print("CLASH name", k, names[k], v, t)
        names[k] = v
    scoped += data.get("scoped", [])

TEXT = {
    ".py",
    ".md",
    ".toml",
    ".yml",
    ".yaml",
    ".cpp",
    ".h",
    ".c",
    ".cc",
    ".hpp",
    ".txt",
    ".json",
    ".cfg",
    ".ini",
    ".sh",
    ".inc",
    ".html",
    ".mm",
    ".typed",
    "",
}
EXCLUDE = ("released-1.0.json",)


def files(suffixes=TEXT):
    out = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    return [
        Path(p)
        for p in out
        if p
        and Path(p).suffix in suffixes
        and not p.endswith(EXCLUDE)
        and Path(p).is_file()
        and not Path(p).is_symlink()
        and "frozen_plugin_1_0" not in p
        and not p.startswith("tools/rename/")
    ]


def dotted(path):
    p = path
    for root in ("core/",):
        if p.startswith(root):
            p = p[len(root) :]
    m = re.match(r"(platforms|plugins|tools)/[^/]+/src/(.*)", p)
    if m:
        p = m.group(2)
    return p.removesuffix(".py").removesuffix("/__init__").replace("/", ".") if p.endswith(".py") else None


def python_sources():
    return files({".py"})


def read(p):
    return p.read_text(encoding="utf-8")


# ------------------------------------------------------------------ modules
def do_modules():
    dots = {}
    for old, new in modules.items():
        if not Path(old).exists():
            print("MISSING", old)
            continue
        a, b = dotted(old), dotted(new)
        if a and b:
            dots[a] = b
    # 1. from pkg import module
    for f in python_sources():
        src = read(f)
        try:
            tree = ast.parse(src)
        except SyntaxError as e:
            print("SYNTAX", f, e)
            continue
        lines = src.split("\n")
        edits, renamed = [], {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                hits = [a for a in node.names if f"{node.module}.{a.name}" in dots]
                if not hits:
                    continue
                groups = collections.OrderedDict()
                for a in node.names:
                    full = f"{node.module}.{a.name}"
                    pkg, name = (
                        dots[full].rsplit(".", 1) if full in dots else (dots.get(node.module, node.module), a.name)
                    )
                    if full in dots and name != a.name and not a.asname:
                        renamed[a.name] = name
                    # keep the mapping from being applied again below
                    groups.setdefault(pkg, []).append(name + (f" as {a.asname}" if a.asname else ""))
                indent = " " * node.col_offset
                tail = lines[node.end_lineno - 1][node.end_col_offset :]
                # marks keep the later dotted pass away
                text = ("\n" + indent).join(
                    f"from {p.replace('mvllm', 'mv@@llm').replace('tests', 'te@@sts')} import {', '.join(ns)}"
                    for p, ns in groups.items()
                )
                edits.append(
                    (
                        node.lineno,
                        node.end_lineno,
                        indent + text + tail if lines[node.lineno - 1][: node.col_offset].strip() == "" else None,
                    )
                )
        if not edits:
            continue
        for lo, hi, text in sorted(edits, reverse=True):
            if text is None:
                print("ODD import", f, lo)
                continue
            lines[lo - 1 : hi] = text.split("\n")
        src = "\n".join(lines)
        if renamed:
            print("MODULE ALIAS", f, renamed)
            for o, n in renamed.items():
                src = re.sub(rf"(?<![\w.\"'/]){o}(?=\.\w)", n, src)
                src = (
                    re.sub(rf"(?<=[(\[, ]){o}(?=[,)])", n, src)
                    if not re.search(rf"\bdef .*\b{o}\b|\b{o}\s*=", src)
                    else src
                )
        f.write_text(src, encoding="utf-8")
    # 2. move
    for old, new in modules.items():
        if not Path(old).exists():
            continue
        Path(new).parent.mkdir(parents=True, exist_ok=True)
    packages = set()
    tmp = {}
    for old, new in modules.items():
        if not Path(old).exists():
            continue
        t = new + ".moving"
        subprocess.run(["git", "mv", old, t], check=True)
        tmp[t] = new
    for t, new in tmp.items():
        subprocess.run(["git", "mv", t, new], check=True)
        if new.endswith(".py"):
            packages.add(Path(new).parent)
    for d in packages:
        if (d.parent / "__init__.py").exists() or any(x in str(d) for x in ("core/mvllm",)):
            init = d / "__init__.py"
            if not init.exists():
                init.write_text("")
                subprocess.run(["git", "add", str(init)], check=True)
                print("NEW PACKAGE", d)
    # 3. text: dotted paths and file paths
    pat = (
        re.compile(r"(?<![\w.])(" + "|".join(sorted(map(re.escape, dots), key=len, reverse=True)) + r")(?!\w)")
        if dots
        else None
    )
    paths = {}
    bases = collections.Counter(
        Path(p).name for p in subprocess.run(["git", "ls-files"], capture_output=True, text=True).stdout.split()
    )
    for old, new in modules.items():
        for prefix in ("", "core/", "core/mvllm/", "tests/"):
            if old.startswith(prefix) and (new.startswith(prefix)) and "/" in old[len(prefix) :]:
                paths[old[len(prefix) :]] = new[len(prefix) :]
                if Path(old).name.startswith("test_"):
                    paths[old[len(prefix) :].removesuffix(".py")] = new[len(prefix) :].removesuffix(".py")
    allbases = collections.Counter(Path(m).name for m in modules)
    base = {
        Path(o).name: Path(n).name
        for o, n in modules.items()
        if Path(o).name != Path(n).name and allbases[Path(o).name] == 1 and bases[Path(o).name] == 0
    }
    ppat = (
        re.compile(
            r"(?<![\w.-])((?:\.\./)*(?:/?[\w./-]*/)?)?("
            + "|".join(sorted(map(re.escape, paths), key=len, reverse=True))
            + r")(?![\w])"
        )
        if paths
        else None
    )
    ppat = (
        re.compile(r"(?<![\w-])(" + "|".join(sorted(map(re.escape, paths), key=len, reverse=True)) + r")(?![\w])")
        if paths
        else None
    )
    bpat = (
        re.compile(r"(?<![\w/.-])(" + "|".join(sorted(map(re.escape, base), key=len, reverse=True)) + r")(?!\w)")
        if base
        else None
    )
    for f in files():
        try:
            src = read(f)
        except UnicodeDecodeError:
            continue
        new = src
        if pat:
            new = pat.sub(lambda m: dots[m.group(1)], new)
        if ppat:
            new = ppat.sub(lambda m: paths[m.group(1)], new)
        if bpat:
            new = bpat.sub(lambda m: base[m.group(1)], new)
        new = new.replace("mv@@llm", "mvllm").replace("te@@sts", "tests") if f.suffix == ".py" else new
        if new != src:
            f.write_text(new, encoding="utf-8")


# ------------------------------------------------------------------ names
def do_names():
    pat = re.compile(r"(?<![\w$])(" + "|".join(sorted(map(re.escape, names), key=len, reverse=True)) + r")(?!\w)")
    counts = collections.Counter()

    def sub(m):
        counts[m.group(1)] += 1
        return names[m.group(1)]

    for f in files():
        if str(f).startswith("docs/changes/"):
            pass
        try:
            src = read(f)
        except UnicodeDecodeError:
            continue
        new = pat.sub(sub, src)
        if new != src:
            f.write_text(new, encoding="utf-8")
    for n in names:
        if not counts[n]:
            print("UNUSED name", n)
    print("names replaced", sum(counts.values()))


# ------------------------------------------------------------------ scoped
def do_scoped():
    wanted = collections.defaultdict(dict)  # class -> {old: new}
    functions = collections.defaultdict(dict)  # module dotted -> {old: new}

    def new_names(cls):
        found = {names[cls]} if cls in names else set()
        found |= {s["new"] for s in scoped if not s.get("class") and s["old"] == cls}
        return found or {cls}

    for s in scoped:
        old, new = s["old"], s["new"]
        if s.get("class"):
            for cls in new_names(s["class"]) | {s["class"]}:
                wanted[cls][old] = new
        else:
            m = modules.get(s["module"], s["module"])
            functions[dotted(m)][old] = new
    # bases by name
    bases, defined = collections.defaultdict(set), collections.defaultdict(set)
    trees = {}
    for f in python_sources():
        tree = ast.parse(read(f))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].add(str(f))
                for b in node.bases:
                    while isinstance(b, ast.Subscript):
                        b = b.value
                    bases[node.name].add(
                        b.id if isinstance(b, ast.Name) else b.attr if isinstance(b, ast.Attribute) else "?"
                    )

    def lookup(cls, old, seen=()):
        if old in wanted.get(cls, {}):
            return wanted[cls][old]
        for b in bases.get(cls, ()):
            if b not in seen:
                r = lookup(b, old, (*seen, cls))
                if r:
                    return r
        return None

    for c in list(wanted):
        if c not in defined:
            print("NO CLASS", c)
    # definitions, and self.x within the class and its subclasses
    for f in python_sources():
        src = read(f)
        tree = ast.parse(src)
        edits = set()
        lines = src.split("\n")

        def at(line, col, old, new):
            edits.add((line, col, old, new))

        def bytecol(line, col):
            return len(lines[line - 1].encode()[:col].decode())

        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for sub in node.body:
                    if isinstance(sub, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        new = lookup(node.name, sub.name)
                        if new:
                            line = lines[sub.lineno - 1]
                            col = re.search(rf"\bdef\s+{sub.name}\b", line)
                            at(sub.lineno, line.index(sub.name, col.start() + 3), sub.name, new)
                            for d in sub.decorator_list:
                                if (
                                    isinstance(d, ast.Attribute)
                                    and isinstance(d.value, ast.Name)
                                    and d.value.id == sub.name
                                ):
                                    at(d.lineno, bytecol(d.lineno, d.col_offset), sub.name, new)
                    if isinstance(sub, ast.AnnAssign) and isinstance(sub.target, ast.Name):
                        new = lookup(node.name, sub.target.id)
                        if new:
                            at(sub.lineno, bytecol(sub.lineno, sub.col_offset), sub.target.id, new)
                    if isinstance(sub, ast.Assign):
                        for t in sub.targets:
                            if isinstance(t, ast.Name):
                                new = lookup(node.name, t.id)
                                if new:
                                    at(t.lineno, bytecol(t.lineno, t.col_offset), t.id, new)
                                if t.id == "__slots__":
                                    for e in ast.walk(sub.value):
                                        if (
                                            isinstance(e, ast.Constant)
                                            and isinstance(e.value, str)
                                            and lookup(node.name, e.value)
                                        ):
                                            at(
                                                e.lineno,
                                                bytecol(e.lineno, e.col_offset) + 1,
                                                e.value,
                                                lookup(node.name, e.value),
                                            )
                for sub in ast.walk(node):
                    if (
                        isinstance(sub, ast.Attribute)
                        and isinstance(sub.value, ast.Name)
                        and sub.value.id in ("self", "cls")
                    ):
                        new = lookup(node.name, sub.attr)
                        if new:
                            at(
                                sub.end_lineno,
                                bytecol(sub.end_lineno, sub.end_col_offset) - len(sub.attr),
                                sub.attr,
                                new,
                            )
                    if (
                        isinstance(sub, ast.Attribute)
                        and isinstance(sub.value, ast.Call)
                        and isinstance(sub.value.func, ast.Name)
                        and sub.value.func.id == "super"
                    ):
                        new = lookup(node.name, sub.attr)
                        if new:
                            at(
                                sub.end_lineno,
                                bytecol(sub.end_lineno, sub.end_col_offset) - len(sub.attr),
                                sub.attr,
                                new,
                            )
        # module functions
        me = dotted(str(f))
        table, aliases = {}, {}
        if me in functions:
            tops = (
                {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
                | {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
                | {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
            )
            for o, n in functions[me].items():
                if o not in tops:
                    print("NO FUNCTION", me, o)
                else:
                    table[o] = n
            for n in tree.body:
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and n.name in table:
                    line = lines[n.lineno - 1]
                    at(n.lineno, line.index(n.name, re.search(r"\b(def|class)\s", line).end()), n.name, table[n.name])
        for n in ast.walk(tree):
            if isinstance(n, ast.ImportFrom) and n.module in functions:
                for a in n.names:
                    if a.name in functions[n.module]:
                        new = functions[n.module][a.name]
                        at(a.lineno, bytecol(a.lineno, a.col_offset), a.name, new)
                        if not a.asname:
                            table[a.name] = new
            if isinstance(n, ast.ImportFrom):
                for a in n.names:
                    if f"{n.module}.{a.name}" in functions:
                        aliases[a.asname or a.name] = functions[f"{n.module}.{a.name}"]
        shadowed = set()

        def visit(node, bound):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                a = node.args
                for d in [*a.defaults, *[k for k in a.kw_defaults if k]]:
                    visit(d, bound)
                for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
                    if x is not None and x.annotation is not None:
                        visit(x.annotation, bound)
                if not isinstance(node, ast.Lambda):
                    for d in node.decorator_list:
                        visit(d, bound)
                    if node.returns is not None:
                        visit(node.returns, bound)
                mine = {x.arg for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg] if x is not None}
                body = node.body if isinstance(node.body, list) else [node.body]
                globals_ = set()
                stack = list(body)
                while stack:
                    x = stack.pop()
                    if isinstance(x, ast.Name) and isinstance(x.ctx, (ast.Store, ast.Del)):
                        mine.add(x.id)
                    if isinstance(x, ast.Global):
                        globals_ |= set(x.names)
                    if isinstance(x, ast.ExceptHandler) and x.name:
                        mine.add(x.name)
                    if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                        mine.add(x.name)
                        continue
                    if isinstance(x, ast.Lambda):
                        continue
                    stack += list(ast.iter_child_nodes(x))
                inner = bound | (mine - globals_)
                for x in body:
                    visit(x, inner)
                return
            if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
                mine = {x.id for g in node.generators for x in ast.walk(g.target) if isinstance(x, ast.Name)}
                visit(node.generators[0].iter, bound)
                inner = bound | mine
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.comprehension):
                        for c in ast.iter_child_nodes(child):
                            if c is not node.generators[0].iter:
                                visit(c, inner)
                    else:
                        visit(child, inner)
                return
            if isinstance(node, ast.Name) and node.id in bound:
                shadowed.add(id(node))
            for child in ast.iter_child_nodes(node):
                visit(child, bound)

        if table:
            visit(tree, frozenset())
        for n in ast.walk(tree):
            if isinstance(n, ast.Name) and n.id in table and id(n) not in shadowed:
                at(n.lineno, bytecol(n.lineno, n.col_offset), n.id, table[n.id])
            if (
                isinstance(n, ast.Attribute)
                and isinstance(n.value, ast.Name)
                and n.value.id in aliases
                and n.attr in aliases[n.value.id]
            ):
                at(
                    n.end_lineno,
                    bytecol(n.end_lineno, n.end_col_offset) - len(n.attr),
                    n.attr,
                    aliases[n.value.id][n.attr],
                )
        if apply(lines, edits, f):
            f.write_text("\n".join(lines), encoding="utf-8")
    # callers through mypy
    for round_ in range(6):
        targets = [
            "core/mvllm",
            "tests",
            *map(str, Path("platforms").glob("*/src")),
            *map(str, Path("plugins").glob("*/src")),
        ]
        out = subprocess.run(
            [
                sys.executable if False else ".venv/bin/mypy",
                "--no-error-summary",
                "--show-column-numbers",
                "--show-error-end",
                "--no-pretty",
                "--show-error-codes",
                "--check-untyped-defs",
                "--allow-untyped-defs",
                *targets,
            ],
            capture_output=True,
            text=True,
        ).stdout
        byfile = collections.defaultdict(set)
        rest = []
        cache = {}
        for line in out.split("\n"):
            m = re.match(r"(.+?):(\d+):(\d+):(\d+):(\d+): error: (.*)", line)
            if not m:
                continue
            path, l, c, el, ec, text = m.group(1), *map(int, m.groups()[1:5]), m.group(6)
            a = re.search(r'"(?:type\[)?([\w.]+)(?:\[.*\])?\]?"(?: of ".*")? has no attribute "(\w+)"', text)
            if a and (new := lookup(a.group(1).split(".")[-1], a.group(2))):
                src = cache.setdefault(path, read(Path(path)).split("\n"))
                old = a.group(2)
                # mypy's end column is inclusive; look for the attribute that ends there
                seg = src[el - 1]
                for end in (ec, ec + 1, ec - 1):
                    if seg[end - len(old) : end] == old:
                        byfile[path].add((el, end - len(old), old, new))
                        break
                else:
                    rest.append(line)
                continue
            a = re.search(r'Unexpected keyword argument "(\w+)" for "(\w+)', text)
            if a and (new := lookup(a.group(2), a.group(1))):
                src = cache.setdefault(path, read(Path(path)).split("\n"))
                for k in range(l - 1, min(el, len(src))):
                    for mm in re.finditer(rf"\b{a.group(1)}(?==[^=])", src[k]):
                        byfile[path].add((k + 1, mm.start(), a.group(1), new))
                continue
            rest.append(line)
        if not byfile:
            break
        for path, edits in byfile.items():
            lines = cache[path]
            apply(lines, edits, path)
            Path(path).write_text("\n".join(lines), encoding="utf-8")
        print("mypy round", round_, sum(map(len, byfile.values())))
    Path("/tmp/mypy_rest.txt").write_text("\n".join(rest))
    print("mypy left:", len(rest), "see /tmp/mypy_rest.txt")


def apply(lines, edits, f):
    for line, col, old, new in sorted(edits, reverse=True):
        text = lines[line - 1]
        if text[col : col + len(old)] != old:
            print("MISPLACED", f, line, col, old, repr(text))
            continue
        lines[line - 1] = text[:col] + new + text[col + len(old) :]
    return bool(edits)


if step in ("all", "modules"):
    do_modules()
if step in ("all", "names"):
    do_names()
if step in ("all", "scoped"):
    do_scoped()
