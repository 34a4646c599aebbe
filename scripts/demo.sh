#!/usr/bin/env bash
# The main job: text in, entities out, with the small model that comes with the package.
# bash scripts/demo.sh [TEXT...]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
install -e .

if [ $# -eq 0 ]; then
    set -- \
        "王小明毕业于江州大学计算机系，现任恒翔科技有限公司技术总监。" \
        "陈立群先生，1972年出生，中国国籍，汉族，中共党员，硕士研究生学历，高级工程师。" \
        "昨天下午，云岭市教育局局长周慧在杭州出席了座谈会。" \
        "李老师，我是张伟的妈妈，孩子今天发烧，想请一天假。" \
        "我姐姐在上海当护士，下个月要去法国旅游。" \
        "黄瓜炒鸡蛋怎么做才好吃？"
fi
.venv/bin/minibert predict -- "$@"
