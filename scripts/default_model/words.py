"""Names, organisations, places and titles put together from lists, so that few are met twice.

Now and then a part of a name is drawn from all characters in use, because no list has every name there is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import tomllib

DIGITS = "〇一二三四五六七八九"
RANKS = ["", "", "高级", "助理", "正高级", "中级", "初级", "副高级", "注册", "执业"]
LEVELS = ["", "", "", "市", "县", "区", "省"]


def common_characters() -> list[str]:
    """The 6,763 characters of GB 2312, the most frequent 3,755 first."""
    rows = [bytes((0xA0 + row, 0xA0 + cell)) for row in range(16, 88) for cell in range(1, 95)]
    return [character for code in rows if (character := code.decode("gb2312", "ignore"))]


def read_lists(folder: Path) -> dict[str, list[str]]:
    """Every list of the TOML files of a folder: words set apart by `、` or a new line."""
    lists: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.toml")):
        for key, words in tomllib.loads(path.read_text(encoding="utf-8")).items():
            if key in lists:
                raise ValueError(f"the list {key} is in two files of {folder}")
            lists[key] = list(
                dict.fromkeys(word.strip() for word in words.replace("\n", "、").split("、") if word.strip())
            )
    return lists


class Words:
    """Fills the slots of templates.

    Args:
        lists: words by the name of the list.
        draw: where chance comes from.
        novelty: how often a part of a name is drawn from all characters instead of the lists.
    """

    def __init__(self, lists: dict[str, list[str]], draw: random.Random, novelty: float) -> None:
        self.lists = lists
        self.draw = draw
        self.novelty = novelty
        self.characters = common_characters()
        self.makers: dict[str, Callable[[str], str]] = {
            "NAME": self.name,
            "ORG": self.organisation,
            "LOC": self.location,
            "TITLE": self.title,
            "EDU": lambda _: self.any("degrees"),
            "CONT": self.nationality,
            "PRO": self.major,
            "RACE": lambda _: "汉族" if self.maybe(0.3) else self.any("races"),
        }

    def slot(self, name: str, kind: str) -> str:
        """What fills a slot: an entity if its name is in capitals, else plain words."""
        return self.makers[name](kind) if name.isupper() else self.plain(name)

    # Chance.

    def any(self, *keys: str) -> str:
        """A word of one of the lists, each list as likely as it is long."""
        key = keys[0] if len(keys) == 1 else self.draw.choices(keys, [len(self.lists[key]) for key in keys])[0]
        return self.draw.choice(self.lists[key])

    def maybe(self, share: float) -> bool:
        return self.draw.random() < share

    def novel(self, low: int, high: int) -> str:
        """Some characters in use, the frequent ones more often."""
        size = self.draw.randint(low, high)
        limit = 3755 if self.maybe(0.9) else len(self.characters)
        return "".join(self.draw.choice(self.characters[:limit]) for _ in range(size))

    # People.

    def surname(self) -> str:
        if self.maybe(0.04):
            return self.any("double_surnames")
        common = self.lists["surnames"][:120]
        return self.draw.choice(common) if self.maybe(0.6) else self.any("surnames")

    def given(self) -> str:
        if self.maybe(self.novelty):
            return self.novel(1, 2)
        if self.maybe(0.4):
            return self.any("given_names")
        return "".join(self.any("given_characters") for _ in range(self.draw.choice((1, 2, 2))))

    def name(self, kind: str) -> str:
        if not kind:
            kinds = {"full": 82, "foreign": 6, "minority": 3, "japanese": 2, "nick": 4, "english": 1, "masked": 1}
            (kind,) = self.draw.choices(list(kinds), list(kinds.values()))
        match kind:
            case "full":
                return self.surname() + self.given()
            case "surname":
                return self.surname()
            case "nick":
                return self.nick()
            case "given":
                given = self.any("nicknames") if self.maybe(0.3) else self.any("given_names")
                return self.novel(2, 2) if self.maybe(self.novelty * 0.5) else given
            case "masked":
                return self.surname() + self.draw.choice(
                    ("某", "某某", "某" + self.any("given_characters"), "××", "XX")
                )
            case "foreign":
                return self.foreign()
            case "english":
                middle = f" {self.draw.choice('ABCDEFGHJKLMPRSTW')}." if self.maybe(0.1) else ""
                last = self.surname_in_letters() if self.maybe(0.3) else self.any("english_surnames")
                return f"{self.any('english_given')}{middle} {last}"
            case "firstname":
                return self.any("english_given")
            case "minority":
                return self.any("minority_names")
            case _:
                return self.any("japanese_surnames") + self.any("japanese_given")

    def surname_in_letters(self) -> str:
        return self.draw.choice(
            (
                "Wang",
                "Li",
                "Zhang",
                "Liu",
                "Chen",
                "Yang",
                "Zhao",
                "Huang",
                "Zhou",
                "Wu",
                "Xu",
                "Sun",
                "Hu",
                "Zhu",
                "Gao",
                "Lin",
            )
        )

    def nick(self) -> str:
        way = self.draw.random()
        if way < 0.45:
            return self.any("nickname_prefixes") + self.surname()
        if way < 0.6:
            return self.any("nickname_prefixes") + self.any("given_characters")
        if way < 0.75:
            return (self.any("surnames") if self.maybe(0.6) else self.any("given_characters")) + self.any(
                "kin_suffixes"
            )
        if way < 0.85:
            return self.any("given_characters") * 2
        return self.any("nicknames")

    def foreign(self) -> str:
        def syllables(low: int, high: int) -> str:
            parts = [self.any("foreign_given", "foreign_surnames") for _ in range(2)]
            mixed = parts[0][: self.draw.randint(1, 2)] + parts[1][-self.draw.randint(1, 2) :]
            return mixed[: self.draw.randint(low, high)] if len(mixed) > low else mixed

        given = syllables(2, 4) if self.maybe(self.novelty) else self.any("foreign_given")
        family = syllables(2, 4) if self.maybe(self.novelty) else self.any("foreign_surnames")
        way = self.draw.random()
        if way < 0.2:
            return given
        if way < 0.4:
            return family
        if way < 0.45:
            return f"{given}·{self.draw.choice('ABCDEFGHJKLMPRSTW')}·{family}"
        return f"{given}·{family}"

    # Organisations.

    def stem(self) -> str:
        if self.maybe(self.novelty):
            return self.novel(2, 3 if self.maybe(0.3) else 2)
        if self.maybe(0.25):  # the characters of two stems give a third
            return self.any("company_stems")[0] + self.any("company_stems")[-1]
        return self.any("company_stems")

    def place(self) -> str:
        """A place as an organisation has it in its name."""
        if self.maybe(self.novelty * 0.4):
            return self.novel(1, 2) + self.draw.choice(("市", "县", "区", "镇", "省", "州", ""))
        key = self.draw.choices(("provinces", "cities", "districts", "towns", "countries"), (25, 50, 15, 5, 5))[0]
        place = self.any(key)
        if key == "cities" and self.maybe(0.15):
            place = self.any("provinces") + place
        return place

    def company(self) -> str:
        where = self.place() if self.maybe(0.5) else ""
        bracket = ""
        if self.maybe(0.1):
            opening, closing = self.draw.choice(("（）", "()", "（）"))
            bracket = f"{opening}{self.any('cities', 'provinces', 'countries')}{closing}"
        industry = self.any("company_industries") if self.maybe(0.85) else ""
        if industry and self.maybe(0.1):
            industry += self.any("company_industries")
        suffix = self.any("company_suffixes")
        if bracket and self.maybe(0.3):
            return where + self.stem() + industry + suffix + bracket
        return where + self.stem() + bracket + industry + suffix

    def department(self) -> str:
        if self.maybe(0.45):
            return self.any("departments")
        field = self.any("department_fields")
        if self.maybe(0.12):
            field += self.draw.choice(("", "与", "和")) + self.any("department_fields")
        return field + self.any("department_kinds")

    def companydept(self) -> str:
        way = self.draw.random()
        if way < 0.45:
            first = self.company()
        elif way < 0.7:
            first = self.short()
        else:
            first = self.any("generic_orgs", "banks_funds", "media")
        if self.maybe(0.3):
            place = self.any("cities", "provinces", "districts") if self.maybe(0.7) else ""
            return first + place + self.any("company_branches")
        return first + self.department()

    def short(self) -> str:
        way = self.draw.random()
        if way < 0.35:
            return self.any("company_short")
        if way < 0.55:
            return self.stem() + self.any("company_industries")
        if way < 0.7:
            return self.stem() + self.draw.choice(
                ("集团", "股份", "控股", "国际", "科技", "网", "传媒", "资本", "实业")
            )
        if way < 0.8:
            return self.any("provinces", "cities") + self.stem()
        if way < 0.92:
            return self.stem()
        return self.draw.choice("ABCDEFGHJKLMNPSTXYZ") + self.draw.choice(("公司", "集团", "银行", "大学", "平台"))

    def school(self) -> str:
        if self.maybe(self.novelty * 0.5):
            stem = self.novel(2, 2)
        else:
            stem = self.any("school_stems") if self.maybe(0.55) else self.any("cities", "provinces", "districts")
        return stem + self.any("school_suffixes")

    def organisation(self, kind: str) -> str:
        draw = self.draw
        place = self.place() if self.maybe(0.65) else ""
        if not kind:
            kinds = (
                "company",
                "short",
                "school",
                "government",
                "association",
                "hospital",
                "media",
                "bank",
                "institute",
            )
            kind = draw.choice(kinds)
        match kind:
            case "company" | "short" | "school" | "department" | "companydept":
                makers = {"company": self.company, "short": self.short, "school": self.school}
                makers |= {"department": self.department, "companydept": self.companydept}
                return makers[kind]()
            case "schooldept":
                return (self.school() if self.maybe(0.75) else self.any("school_short")) + self.any("faculties")
            case "government":
                place = "" if place in self.lists["countries"] else place
                organ = self.any("government")
                level = draw.choice(LEVELS) if organ[-1] in "局委厅" and not place and len(organ) < 6 else ""
                return place + level + organ if organ[0] not in "国中全最" else organ
            case "governmentdept":
                return place + self.any("government") + self.any("government_departments", "departments")
            case "association" | "institute":
                return place + self.any({"association": "parties_groups", "institute": "institutes"}[kind])
            case "hospital" | "hospitaldept":
                stem = self.novel(2, 2) if self.maybe(self.novelty) else self.any("company_stems", "school_stems")
                first = (place or stem) if self.maybe(0.8) else stem
                return first + self.any("hospitals") + (self.any("hospital_departments") if kind[-1] == "t" else "")
            case "shop":
                first = (
                    self.stem() if self.maybe(0.6) else self.any("roads", "cities", "towns", "surnames", "nicknames")
                )
                return first + self.any("shops")
            case "bank":
                branch = (self.any("cities", "districts") + draw.choice(("分行", "支行"))) if self.maybe(0.25) else ""
                name = self.any("banks_funds")
                return name + branch if name.endswith("银行") else name
            case "media":
                if self.maybe(0.35):
                    stem = self.place() or self.stem()
                    endings = (
                        "日报 晚报 都市报 电视台 卫视 新闻网 晨报 广播电台 周刊 早报 商报 日报社 新闻频道 交通广播"
                    )
                    return stem + draw.choice(endings.split())
                return self.any("media")
            case "team":
                if self.maybe(0.35):
                    animals = "猛虎 飞鹰 雄狮 海豚 飞龙 战狼 雪豹 火箭 飓风 星辰 闪电 蓝鲸 骑士 猎豹 烈焰"
                    return (
                        self.any("cities", "provinces")
                        + draw.choice(animals.split())
                        + draw.choice(["队", "队", "男篮", "女排"])
                    )
                return self.any("military_police_sport")
            case "english":
                return self.any("english_companies")
            case _:
                return self.any(
                    {"generic": "generic_orgs", "schoolshort": "school_short", "foreign": "foreign_orgs"}[kind]
                )

    # Places.

    def location(self, kind: str) -> str:
        draw = self.draw
        if not kind:
            kinds = [
                "city",
                "city",
                "province",
                "district",
                "country",
                "scenic",
                "foreigncity",
                "address",
                "place",
                "town",
            ]
            kind = draw.choice(kinds)
        if kind == "address":
            return self.address()
        if kind == "road":
            return self.road()
        endings = {
            "city": "市州",
            "district": "区县",
            "town": "镇乡",
            "village": "村",
            "place": "站",
            "scenic": "山湖江岛",
        }
        if kind in endings and self.maybe(self.novelty * 0.4):
            return self.novel(2, 2) + draw.choice(endings[kind])
        if kind == "place" and self.maybe(0.3):
            ends = "站 火车站 机场 广场 公园 大桥 码头 小区 花园 大厦 体育馆 东站 汽车站 地铁站 开发区 步行街"
            ends += " 家园 国际机场"
            return self.any("cities", "districts", "school_stems", "company_stems") + draw.choice(ends.split())
        if kind == "city" and self.maybe(0.12):
            return self.any("provinces") + self.any("cities")
        keys = {
            "province": "provinces",
            "city": "cities",
            "district": "districts",
            "town": "towns",
            "village": "villages",
        }
        keys |= {"country": "countries", "foreigncity": "foreign_cities", "scenic": "scenic", "region": "regions"}
        return self.any(keys.get(kind, "places"))

    def address(self) -> str:
        parts = [self.any("provinces"), self.any("cities"), self.any("districts"), self.any("towns"), self.road()]
        start = self.draw.choice((0, 0, 0, 1, 2))
        end = self.draw.choice((2, 3, 5))
        if end <= start:
            end = start + 2
        kept = [part for index, part in enumerate(parts) if start <= index < end and (index != 3 or self.maybe(0.4))]
        return "".join(kept)

    def road(self) -> str:
        number = self.draw.randint(1, 999)
        details = ("", "", f"{number}号", f"{number}号", f"{number}弄{self.draw.randint(1, 60)}号")
        ends = (
            "",
            "",
            "",
            f"{self.draw.randint(1, 30)}栋",
            f"{self.draw.randint(1, 30)}层",
            f"{self.draw.randint(101, 2904)}室",
        )
        detail = self.draw.choice(details)
        return self.any("roads") + detail + (self.draw.choice(ends) if detail else "")

    # Titles, studies, nationalities.

    def title(self, kind: str) -> str:
        if kind == "short":
            return self.any("titles_short")
        if not kind:
            kind = self.draw.choice(("company", "academic", "rank", "government", "everyday"))
        if kind == "company" and self.maybe(0.4):
            field, rank = self.any("title_fields", "department_fields"), self.any("title_ranks")
            way = self.draw.random()
            if way < 0.6:
                return field + rank
            if way < 0.8:
                return self.any("title_prefixes") + rank
            return field + self.any("title_prefixes") + rank
        if kind == "rank" and self.maybe(0.3):
            return self.draw.choice(RANKS) + self.any("rank_fields") + "师"
        if kind == "everyday" and self.maybe(self.novelty * 0.5):
            what = (
                self.novel(1, 2)
                if self.maybe(0.5)
                else self.any("things", "foods", "products", "objects", "animals", "verbs")
            )
            return what + self.draw.choice(
                ("师", "员", "工", "手", "师傅", "家", "老师", "商", "工人", "专家", "经理", "运动员")
            )
        title = self.any(f"titles_{kind}")
        if kind in ("company", "government") and self.maybe(0.08) and not title.startswith("副"):
            title = self.draw.choice(("副", "代理", "常务副", "执行", "名誉", "代")) + title
        return title

    def major(self, _: str) -> str:
        major = self.any("majors")
        if self.maybe(self.novelty * 0.4):
            what = (
                self.novel(2, 3) if self.maybe(0.5) else self.any("company_industries", "products", "department_fields")
            )
            major = what + self.draw.choice(("学", "工程", "技术", "管理", "与技术", "设计", ""))
            return major + "专业" if major == what else major
        if major.endswith("专业"):
            return major
        return major + self.draw.choice(("专业", "", "", "", "方向" if self.maybe(0.1) else ""))

    def nationality(self, _: str) -> str:
        if self.maybe(0.5):
            (common,) = self.draw.choices(("中国国籍", "中国籍", "中国"), (80, 15, 5))
            return common
        if self.maybe(0.3):
            return self.any("countries") + self.draw.choice(("国籍", "籍"))
        return self.any("nationalities")

    # What is no entity.

    def plain(self, name: str) -> str:
        draw = self.draw
        year, month, day = draw.randint(1930, 2029), draw.randint(1, 12), draw.randint(1, 28)
        match name:
            case "year":
                return str(year)
            case "yearmonth":
                return f"{year}年{month}月"
            case "date":
                return draw.choice(
                    (
                        f"{year}年{month}月{day}日",
                        f"{month}月{day}日",
                        f"{month}月{day}号",
                        draw.choice(["昨天", "明天", "今天", "周末", "上个月", "本月底", "去年", f"{month}月"]),
                        draw.choice(("周", "周", "星期", "下周", "上周")) + draw.choice("一二三四五六"),
                    )
                )
            case "dateslash":
                return draw.choice(
                    (f"{year}/{month:02}", f"{year}.{month}", f"{year}-{month:02}-{day:02}", f"{year}.{month:02}")
                )
            case "time":
                half = draw.choice(["上午", "下午", "早上", "晚上", "中午", "凌晨"])
                return draw.choice(
                    (
                        f"{draw.randint(0, 23)}:{draw.randint(0, 59):02}",
                        f"{half}{DIGITS[draw.randint(1, 9)]}点",
                        f"{half}{draw.randint(1, 12)}点半",
                    )
                )
            case "age":
                return str(draw.randint(1, 99))
            case "number":
                return str(draw.choice((draw.randint(1, 12), draw.randint(1, 60), draw.randint(1, 5000))))
            case "money":
                return draw.choice(
                    (
                        f"{draw.randint(1, 9000)}元",
                        f"{draw.randint(1, 900)}万元",
                        f"{draw.randint(1, 99)}.{draw.randint(0, 9)}亿元",
                        f"{draw.randint(2, 99)}块钱",
                    )
                )
            case "percent":
                return f"{draw.randint(0, 99)}.{draw.randint(0, 99)}%"
            case "phone":
                if self.maybe(0.3):
                    return f"0{draw.randint(10, 999)}-{draw.randint(10**6, 10**8 - 1)}"
                return f"1{draw.randint(3, 9)}{draw.randint(0, 10**9 - 1):09}"
            case "email":
                letters = "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randint(3, 9)))
                return f"{letters}@example.com"
            case "id":
                return f"{draw.choice('ABCDGKXZ')}{draw.randint(10, 99999)}"
            case "gender":
                return draw.choice("男女")
            case "season":
                return draw.choice("春夏秋冬") + draw.choice(("天", "季"))
            case _:
                keys = {
                    "product": "products",
                    "book": "books_films",
                    "event": "events",
                    "food": "foods",
                    "verb": "verbs",
                }
                keys |= {"activity": "activities", "thing": "things", "feeling": "feelings", "nearmiss": "near_misses"}
                keys |= {"relative": "relatives", "animal": "animals", "object": "objects", "remark": "remarks"}
                return self.any(keys[name])
